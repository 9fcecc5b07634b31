"""Reads the rows of a commit on the stack's own hub, for the pages of the console. It opens only
text, and only so much that the memory of the hub is enough, whatever was pushed."""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path

from pipeline.doctor.push_remarks import CHECKED_SUFFIXES, MAX_BYTES
from pipeline.errors import PipelineError
from pipeline.formats import MAX_HEAD_CHARACTERS
from pipeline.hub.contents import changed_files, list_tree, read_blobs, read_commit
from pipeline.hub.repositories import Repository
from pipeline.retrain.dataset import CARD, Dataset, is_needed, read_dataset
from pipeline.retrain.errors import DataError
from pipeline.retrain.rows import Difference, Row, difference
from pipeline.retrain.settings import DataSettings


@dataclass(frozen=True, kw_only=True)
class Rows:
    dataset: Dataset
    """Its folder is gone."""
    bad: tuple[DataError, ...]
    """What is wrong with rows and files."""
    unread: Mapping[str, str]
    """File → why it was not read here. A job reads it."""

    @property
    def all(self) -> tuple[Row, ...]:
        """The rows of all splits."""
        return tuple(chain.from_iterable(self.dataset.rows.values()))


@contextmanager
def opened(
    repository: Repository,
    commit: str,
    settings: DataSettings,
    only: frozenset[str] | None = None,
) -> Iterator[tuple[Path, Rows]]:
    """A folder with the text files of the commit, until the block ends, and the rows in them. With
    `only`, the other files count as missing. Raises DataError if the settings or the dataset card
    cannot be understood."""
    unread, paths, read, num_bytes = {}, [], {}, 0
    for entry in list_tree(repository, commit, recursive=True):
        if entry.type != "file" or (only is not None and entry.path not in (*only, CARD)):
            continue
        paths.append(entry.path)
        if not is_needed(entry.path):
            continue
        is_text = entry.path == CARD or entry.path.lower().endswith(CHECKED_SUFFIXES)
        limit = MAX_HEAD_CHARACTERS if entry.path == CARD else MAX_BYTES - num_bytes
        if entry.lfs is not None or not is_text:
            unread[entry.path] = "only text files are read here, and a job reads this one"
        elif entry.size_bytes > limit:
            unread[entry.path] = "there is too much text to read it here, and a job reads it"
        else:
            read[entry.path] = entry.oid
            num_bytes += entry.size_bytes
    contents = dict(read_blobs(repository, list(read.values())))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for path, oid in read.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(contents[oid])
        bad: list[DataError] = []
        try:
            files = [path for path in paths if path not in unread]
            dataset = read_dataset(folder, files, settings, bad.append)
        except ModuleNotFoundError as error:
            raise PipelineError(
                f"the head of {CARD} needs {error.name} to be read, and it is not installed: "
                "pip install 'hotpush[torch]'"
            ) from None
        yield folder, Rows(dataset=dataset, bad=tuple(bad), unread=unread)


@lru_cache(maxsize=2)  # at MAX_BYTES, one needs some ten times as much memory
def read_rows(repository: Repository, commit: str, settings: DataSettings) -> Rows:
    """The rows of a commit. Raises the errors of `opened`."""
    with opened(repository, commit, settings) as (_, rows):
        return rows


@lru_cache(maxsize=16)
def rows_between(
    repository: Repository, old: str | None, new: str, settings: DataSettings
) -> tuple[Difference, Mapping[str, str]]:
    """What separates the rows of two commits, and the changed files that were not read. All rows
    are new if `old` is None. Raises the errors of `opened`."""
    changed = changed_files(repository, old, new)
    if old is not None:  # also the files that are gone
        changed += changed_files(repository, new, old)
    # Rows of unchanged files separate nothing. But another card may lead to other files.
    names = frozenset(entry.path for entry in changed)
    only = None if CARD in names else names
    before: tuple[Row, ...] = ()
    if old is not None:
        with opened(repository, old, settings, only) as (_, rows):
            before = rows.all
    with opened(repository, new, settings, only) as (_, rows):
        return difference(before, rows.all), rows.unread


def parent_of(repository: Repository, commit: str) -> str | None:
    """The first parent of a commit."""
    return next(iter(read_commit(repository, commit).parents), None)
