"""What the stack's own hub says about the rows of a commit while a person waits: the rows and the
changes, for the pages of the console, and the remarks on a push. It opens only text, and only so
much that the memory of the hub is enough, whatever was pushed."""

import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path

from jobs.spec import full_ref
from pipeline.errors import PipelineError
from pipeline.formats import MAX_HEAD_CHARACTERS, may_be_pointer
from pipeline.hub.contents import (
    Entry,
    changed_files,
    find_paths,
    list_tree,
    read_blobs,
    read_file,
    read_tree,
    resolve_revision,
)
from pipeline.hub.large_files import LargeFiles
from pipeline.hub.repositories import RefChange, Repository, new_file_path
from pipeline.retrain.data import grouped
from pipeline.retrain.dataset import CARD, Dataset, is_needed, read_dataset, sort_files, why_no_data
from pipeline.retrain.errors import DataError
from pipeline.retrain.rows import Row, difference
from pipeline.retrain.settings import DataSettings
from pipeline.settings import PipelineSettings
from serving.questions import WordIndex

logger = logging.getLogger(__name__)

NUM_NEAREST = 5
MAX_BYTES = 4 * 1024 * 1024
"""The largest total size of the files that are read, because a person or a client waits."""
CHECKED_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".txt")
"""Only rows of files with these suffixes are read. The hub does not open compressed files, such as
`.jsonl.gz` and `.parquet`: a small compressed file may become so large when it is unpacked that it
fills the hub's memory."""
MAX_NAMED = 5
"""The remarks name at most this many faults of rows, this many missing files, and this many files
that the pipeline does not read."""


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


# The remarks on a push


class PushRemarks:
    """Checks pushes to the datasets of `pipelines`, and writes remarks for the person who pushed:
    for example, that no pipeline follows the branch, or that a row cannot be read. Git and the
    Hugging Face clients show these remarks, so the person sees a mistake without looking into the
    job's log."""

    def __init__(self, pipelines: Sequence[PipelineSettings]) -> None:
        # Each pipeline with the ref of the branch that it follows.
        self._pipelines = [(one, full_ref(one.ref)) for one in pipelines]

    def __call__(
        self, repository: Repository, bases: Mapping[str, str], changes: Sequence[RefChange]
    ) -> list[str]:
        """The remarks on a push that made these changes, one line each. Empty if there is nothing
        to remark, or if the push could not be checked.

        `bases` has the open pull requests: ref → the ref of the branch that it is for.
        """
        try:
            # Several pipelines may give the same remark.
            return list(dict.fromkeys(self._lines(repository, bases, changes)))
        except Exception as error:
            # Only log the error, whatever it is. If this method raised it, the client would be told
            # that the hub refused the push, although the push is already stored.
            is_expected = isinstance(error, PipelineError | OSError | ValueError)
            said = "a push to %s was not checked: %s"
            logger.warning(said, repository.name, error, exc_info=not is_expected)
            return []

    def _lines(
        self, repository: Repository, bases: Mapping[str, str], changes: Sequence[RefChange]
    ) -> Iterator[str]:
        if repository.name.type != "dataset":
            return
        present = repository.name.id
        # Compare in lower case, because the hub and the receiver accept a name in any case.
        followers = [
            (one, ref) for one, ref in self._pipelines if one.dataset.lower() == present.lower()
        ]
        for change in changes:
            if change.new_sha is None or not followers:
                continue
            # No job trains on a pull request before its merge. But name unreadable rows now, so
            # that they can be corrected before the merge.
            branch = bases.get(change.ref, change.ref)
            pipelines = [one for one, ref in followers if ref == branch]
            is_pushed_branch = change.ref.startswith("refs/heads/")
            if is_pushed_branch and not pipelines:
                name = branch.removeprefix("refs/heads/")
                followed = ", ".join(sorted({one.ref for one, _ in followers}))
                yield f"No pipeline follows the branch {name!r}; pipelines follow {followed}."
            if not pipelines:
                continue
            if _has_long_card(repository, change):
                yield (
                    f"The hub checked no rows of this push: README.md has more than "
                    f"{MAX_HEAD_CHARACTERS:,} bytes. {_jobs_of(pipelines)} will check all rows."
                )
                continue
            if is_pushed_branch:
                yield from _ignored_data_files(repository, change, pipelines)
            yield from _unreadable_rows(repository, change, pipelines)


def _has_long_card(repository: Repository, change: RefChange) -> bool:
    """Whether the README, before or after the push, takes long to read."""
    return any(
        entry.size_bytes > MAX_HEAD_CHARACTERS
        for commit in filter(None, (change.old_sha, change.new_sha))
        for entry in find_paths(repository, commit, [CARD])
    )


def _jobs_of(pipelines: Sequence[PipelineSettings]) -> str:
    return "The job of " + " and the job of ".join(pipeline.name for pipeline in pipelines)


def _ignored_data_files(
    repository: Repository, change: RefChange, pipelines: Sequence[PipelineSettings]
) -> Iterator[str]:
    """A remark for each pipeline on files that look like data, but that the pipeline does not read.
    For example, if the README lists the files of the dataset, the pipeline reads only the listed
    files. `Dataset.push_to_hub` writes such a README."""
    assert change.new_sha is not None
    changed = {file.path for file in changed_files(repository, change.old_sha, change.new_sha)}
    paths, card = _paths_and_card(repository, change.new_sha)
    old = None
    if change.old_sha is not None and CARD in changed:
        old = _paths_and_card(repository, change.old_sha)
    for pipeline in pipelines:
        now = sort_files(paths, pipeline.data, card)
        left_out = {path for path in changed if path in now.ignored and why_no_data(path) is None}
        if old is not None:
            before = sort_files(old[0], pipeline.data, old[1])
            left_out |= set(now.ignored) & set(chain.from_iterable(before.splits.values()))
        if left_out:
            named = sorted(left_out)
            more = f" and {len(named) - MAX_NAMED} more" if len(named) > MAX_NAMED else ""
            reason = now.ignored[named[0]]
            yield (
                f"{pipeline.name} reads no rows of {', '.join(named[:MAX_NAMED])}{more}: {reason}. "
                f"`pipeline data check` lists the files that {pipeline.name} reads."
            )


def _paths_and_card(repository: Repository, commit: str) -> tuple[Sequence[str], str]:
    """The paths of all files of a commit, and the text of its README."""
    card = "".join(
        read_file(repository, entry).decode(errors="replace")
        for entry in find_paths(repository, commit, [CARD])
    )
    tree = read_tree(repository, commit)
    return [path for path, entry in tree.items() if entry.type == "file"], card


def _unreadable_rows(
    repository: Repository, change: RefChange, pipelines: Sequence[PipelineSettings]
) -> Iterator[str]:
    """Remarks on the changed files: large files whose content is missing, and rows that a job of
    one of the pipelines could not read. If the files have more than MAX_BYTES in total, the only
    remark is that nothing was checked."""
    assert change.new_sha is not None
    changed = changed_files(repository, change.old_sha, change.new_sha)
    files = [each for each in changed if not each.is_link and is_needed(each.path)]
    read = [each for each in files if is_text(each.path) or may_be_pointer(each.size_bytes)]
    if sum(each.size_bytes for each in read) > MAX_BYTES:
        yield (
            "The hub checked no rows of this push: README.md and the changed text files have more "
            f"than {MAX_BYTES // 1024**2} MiB together. {_jobs_of(pipelines)} will check all rows."
        )
        return
    links = [each.path for each in changed if each.is_link and is_needed(each.path)]
    for path in links[:MAX_NAMED]:
        yield f"{path}: it is a symbolic link; put the file itself in its place."
    missing = [
        each.path
        for each in find_paths(repository, change.new_sha, [each.path for each in read])
        if each.lfs is not None and LargeFiles(repository.folder).size(each.lfs.oid) is None
    ]
    for path in missing[:MAX_NAMED]:
        yield f"{path}: this large file was not uploaded: run `git lfs push --all origin`."
    if len(missing) > MAX_NAMED:
        yield f"{len(missing) - MAX_NAMED} more large files were not uploaded."
    for pipeline in pipelines:
        only = frozenset(each.path for each in read)
        with opened(repository, change.new_sha, pipeline.data, only) as (_, rows):
            problems = grouped(rows.bad)
        yield from problems[:MAX_NAMED]
        if len(problems) > MAX_NAMED:
            yield "More is wrong with other rows: see `pipeline data check`."
        if problems or missing or links:
            yield f"The job of {pipeline.name} will fail until this is corrected."
