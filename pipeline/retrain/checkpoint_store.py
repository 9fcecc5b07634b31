"""Copies of a job's checkpoints in a store that other machines reach too (`checkpoint_url`). So an
attempt on another machine continues from there.

An error of the store fails no job: it is logged, and the training goes on without the store.
"""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline.retrain.job import CHECKPOINT
from serving.errors import first_line
from serving.weights.atomic_file import write_atomically

logger = logging.getLogger("pipeline.retrain")

PLACE = "checkpoint_url.txt"
"""The file in the job's folder that says where `put` puts the job's checkpoints."""


def go_on_from(url: str, job_dir: Path) -> None:
    """Fetch the checkpoint at `url`, if there is one and the job has none of its own. From now on,
    `put` puts the job's checkpoints there."""
    write_atomically(job_dir / PLACE, url)
    if (job_dir / CHECKPOINT).exists():
        return
    with _errors_told(url):
        store, folder = _open(url)
        if not store.exists(f"{folder}/{CHECKPOINT}"):
            return
        record = store.cat_file(f"{folder}/{CHECKPOINT}").decode()
        file = job_dir / json.loads(record)["file"]
        file.parent.mkdir(exist_ok=True)
        store.get_file(f"{folder}/{file.name}", str(file))
        write_atomically(job_dir / CHECKPOINT, record)
        logger.info("going on from the checkpoint %s at %s", file.stem, url)


def put(job_dir: Path, file: Path) -> None:
    """Put the job's last checkpoint, whose state is in `file`, into the job's store, if it has one.
    At any time, the record there names a complete file."""
    if not (job_dir / PLACE).exists():
        return
    url = (job_dir / PLACE).read_text()
    with _errors_told(url):
        store, folder = _open(url)
        store.makedirs(folder, exist_ok=True)
        store.put_file(str(file), f"{folder}/{file.name}")
        store.pipe_file(f"{folder}/{CHECKPOINT}", (job_dir / CHECKPOINT).read_bytes())
        for other in store.ls(folder, detail=False):
            if Path(other).name not in (file.name, CHECKPOINT):
                store.rm_file(other)


def remove(url: str) -> None:
    """Remove all checkpoints at `url`."""
    with _errors_told(url):
        store, folder = _open(url)
        if store.exists(folder):
            store.rm(folder, recursive=True)


def _open(url: str) -> tuple[Any, str]:
    """The file system of `url`, and its folder there."""
    from fsspec.core import url_to_fs  # takes a while, and most pipelines do not need it

    store, folder = url_to_fs(url, use_listings_cache=False)
    return store, folder


@contextmanager
def _errors_told(url: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # each store has its own exceptions
        logger.warning("checkpoints at %s: %s: %s", url, type(error).__name__, first_line(error))
