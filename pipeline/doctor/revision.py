"""Reads the rows of a commit on the stack's own hub, for the pages of the console and for the
remarks on a push. It opens only text, and only so much that the memory of the hub is enough,
whatever was pushed."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path

from pipeline.errors import PipelineError
from pipeline.formats import MAX_HEAD_CHARACTERS
from pipeline.hub.contents import (
    Entry,
    changed_files,
    find_paths,
    list_tree,
    read_blobs,
    resolve_revision,
)
from pipeline.hub.repositories import Repository, new_file_path
from pipeline.retrain.data import grouped
from pipeline.retrain.dataset import CARD, Dataset, is_needed, read_dataset
from pipeline.retrain.errors import DataError
from pipeline.retrain.rows import Row, difference
from pipeline.retrain.settings import DataSettings
from serving.questions import WordIndex

NUM_NEAREST = 5
MAX_BYTES = 4 * 1024 * 1024
"""The largest total size of the files that are read, because a person or a client waits."""
CHECKED_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".txt")
"""Only rows of files with these suffixes are read. The hub does not open compressed files, such as
`.jsonl.gz` and `.parquet`: a small compressed file may become so large when it is unpacked that it
fills the hub's memory."""


def is_text(path: str) -> bool:
    return path == CARD or path.lower().endswith(CHECKED_SUFFIXES)


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

    def check_editable(self, file: str) -> None:
        """Raises DataError if the file exists and was not read: to add a row would replace it. Also
        if it is no text that a job reads, and BadRequest if it cannot exist."""
        has_rows = file.lower().endswith(CHECKED_SUFFIXES)
        other = "" if has_rows else f"its name ends with none of {', '.join(CHECKED_SUFFIXES)}"
        if why := {**self.dataset.files.ignored, **self.unread}.get(new_file_path(file), other):
            raise DataError.at(file, None, f"its rows cannot be changed here: {why}")


@contextmanager
def opened(
    repository: Repository,
    commit: str | None,
    settings: DataSettings,
    only: frozenset[str] | None = None,
) -> Iterator[tuple[Path, Rows]]:
    """A folder with the text files of the commit, until the block ends, and the rows in them. With
    `only`, the other files count as missing; without a commit, all. Raises DataError if the
    settings or the dataset card cannot be understood."""
    unread, paths, read, num_bytes = {}, [], {}, 0
    entries: Sequence[Entry] = ()
    if commit is not None and only is not None:
        entries = find_paths(repository, commit, sorted({*only, CARD}))
    elif commit is not None:
        entries = list_tree(repository, commit, recursive=True)
    for entry in entries:
        if entry.type != "file":
            continue
        paths.append(entry.path)
        if not is_needed(entry.path):
            continue
        limit = MAX_HEAD_CHARACTERS if entry.path == CARD else MAX_BYTES - num_bytes
        if entry.lfs is not None or not is_text(entry.path):
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
                f"the head of {CARD} needs {error.name} to be read, and it is not installed; "
                "run in the folder of hotpush: pip install -e '.[torch]'"
            ) from None
        yield folder, Rows(dataset=dataset, bad=tuple(bad), unread=unread)


@lru_cache(maxsize=2)  # at MAX_BYTES, one needs some ten times as much memory
def read_rows(repository: Repository, commit: str | None, settings: DataSettings) -> Rows:
    """The rows of a commit. Raises the errors of `opened`."""
    with opened(repository, commit, settings) as (_, rows):
        return rows


@dataclass(frozen=True, kw_only=True)
class Change:
    """What separates the rows of two commits."""

    added: tuple[Row, ...]
    edited: tuple[tuple[Row, Row], ...]
    """The old and the new version of each row."""
    deleted: tuple[Row, ...]
    wrong: tuple[str, ...]
    """What is wrong with rows of the changed files, in words."""
    not_read: Mapping[str, str]
    """Changed file → why no row of it was read."""


def rows_between(
    repository: Repository, old: str | None, new: str, settings: DataSettings
) -> Change:
    """All rows are added if `old` is None. Raises the errors of `opened`, and RevisionNotFound."""
    before = None if old is None else resolve_revision(repository, old)
    return _change(repository, before, resolve_revision(repository, new), settings)


@lru_cache(maxsize=16)
def _change(repository: Repository, old: str | None, new: str, settings: DataSettings) -> Change:
    changed = changed_files(repository, old, new)
    if old is not None:  # also the files that are gone
        changed += changed_files(repository, new, old)
    # Rows of unchanged files separate nothing. But another card may lead to other files.
    names = frozenset(entry.path for entry in changed)
    only = None if CARD in names else names
    with opened(repository, old, settings, only) as (_, rows):
        before = rows.all
    with opened(repository, new, settings, only) as (_, rows):
        found = difference(before, rows.all)
    not_read = {**rows.dataset.files.ignored, **rows.unread}
    versions = {after.digest for _, after in found.edited}
    return Change(
        added=tuple(row for row in found.added if row.digest not in versions),
        edited=found.edited,
        deleted=found.deleted,
        wrong=grouped(rows.bad),
        not_read={file: why for file, why in not_read.items() if file in names},
    )


def nearest(
    repository: Repository, revision: str, settings: DataSettings, question: str
) -> list[Row]:
    """The rows of the train split that have the most telling words of the question. Raises the
    errors of `opened`, and RevisionNotFound."""
    rows, index = _index(repository, resolve_revision(repository, revision), settings)
    return [rows[number] for number, _ in index.nearest(question, NUM_NEAREST)]


@lru_cache(maxsize=2)
def _index(
    repository: Repository, commit: str, settings: DataSettings
) -> tuple[Sequence[Row], WordIndex]:
    rows = read_rows(repository, commit, settings).dataset.train
    return rows, WordIndex("\n".join(map(str, row.texts)) for row in rows)
