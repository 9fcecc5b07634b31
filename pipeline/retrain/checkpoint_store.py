"""The place of a job's checkpoints: its folder, or a store that other machines reach too
(`checkpoint_url`), so that an attempt on another machine continues from there.

An error of the store fails no job: it is logged, and the training goes on.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline.retrain.job import CHECKPOINT, CHECKPOINTS_DIR
from serving.errors import first_line
from serving.weights.atomic_file import write_atomically

logger = logging.getLogger("pipeline.retrain")

PLACE = "checkpoint_url.txt"
"""The file in the job's folder that says where the job's checkpoints are, if not in the folder."""


def use(url: str, job_dir: Path, *, goes_on: bool) -> None:
    """From now on, the checkpoints of the job are at `url`. If it `goes_on`, and has no record of a
    checkpoint, fetch the record that is there."""
    write_atomically(job_dir / PLACE, url)
    if not goes_on or (job_dir / CHECKPOINT).exists():
        return
    with errors_told(url):
        store, folder = open_store(url)
        if store.exists(f"{folder}/{CHECKPOINT}"):
            record = store.cat_file(f"{folder}/{CHECKPOINT}").decode()
            write_atomically(job_dir / CHECKPOINT, record)


def place_of(job_dir: Path) -> str:
    """Where the job's checkpoints are: a path or a URL."""
    url = job_dir / PLACE
    return url.read_text() if url.exists() else str(job_dir / CHECKPOINTS_DIR)


def keep_only(job_dir: Path, name: str) -> None:
    """Remove all checkpoints of the job but the one of this name, the newest. Into a store, first
    copy its record. At any time, the record there names a complete checkpoint."""
    url = place_of(job_dir)
    with errors_told(url):
        store, folder = open_store(url)
        if (job_dir / PLACE).exists():
            # A write into a folder may be cut off, and a rename not.
            written = f"{folder}/{CHECKPOINT}.new"
            store.pipe_file(written, (job_dir / CHECKPOINT).read_bytes())
            store.mv(written, f"{folder}/{CHECKPOINT}")
        for other in store.ls(folder, detail=False):
            if Path(other).name not in (name, CHECKPOINT):
                store.rm(other, recursive=True)


def remove(url: str) -> None:
    """Remove all checkpoints at `url`."""
    with errors_told(url):
        store, folder = open_store(url)
        if store.exists(folder):
            store.rm(folder, recursive=True)


def open_store(url: str) -> tuple[Any, str]:
    """The file system of `url`, and its folder there."""
    from fsspec.core import url_to_fs  # takes a while, and a job without a training needs none

    store, folder = url_to_fs(url, use_listings_cache=False)
    return store, folder


@contextmanager
def errors_told(url: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # each store has its own exceptions
        logger.warning("checkpoints at %s: %s: %s", url, type(error).__name__, first_line(error))
