"""`Dataset`: the rows of one dataset revision, by split (train, validation, test)."""

import filecmp
import posixpath
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path

from pipeline.retrain.columns import KNOWN, RowColumns
from pipeline.retrain.data_files import CARD, SUFFIXES, DataFiles, Split, sort_files
from pipeline.retrain.errors import DataError, fail
from pipeline.retrain.reading import read_file
from pipeline.retrain.rows import Row
from pipeline.retrain.settings import DataSettings

MAX_LINK_BYTES = 1_024
"""A symbolic link with a longer path is not recognized."""


@dataclass(frozen=True, kw_only=True)
class Dataset:
    folder: Path
    files: DataFiles
    by_file: Mapping[str, tuple[Row, ...]]
    """The rows of each file that was read."""

    @cached_property
    def rows(self) -> Mapping[Split, tuple[Row, ...]]:
        """The rows of each split that have anything to learn: sorted by file name, and within a
        file in their order there."""
        return {
            split: tuple(row for file in files for row in self.by_file[file] if row.is_learnable)
            for split, files in self.files.splits.items()
        }

    @property
    def nothing_to_learn(self) -> tuple[Row, ...]:
        """The rows of all files that are left out, because they have nothing to learn."""
        return tuple(row for row in chain(*self.by_file.values()) if not row.is_learnable)

    @property
    def train(self) -> tuple[Row, ...]:
        return self.rows["train"]

    @property
    def held_out_split(self) -> Split:
        """The split that is measured: the validation split. If only the test split has rows, it is
        the test split."""
        return "validation" if self.rows["validation"] or not self.rows["test"] else "test"

    @property
    def held_out(self) -> tuple[Row, ...]:
        """The rows that the dataset's author holds out, to be measured but never trained on. A row
        that is also in the train split is left out."""
        learned = {row.digest for row in self.train}
        return tuple(row for row in self.rows[self.held_out_split] if row.digest not in learned)


def read_dataset(
    folder: Path,
    files: Collection[str],
    settings: DataSettings,
    on_error: Callable[[DataError], None] = fail,
    *,
    before: Dataset | None = None,
) -> Dataset:
    """Read the rows of a revision. `settings` say which files hold rows, and which columns.

    files: the paths of all files in the repository, relative to `folder`. on_error: is called for
    each row that cannot be read. If it raises nothing, this row is left out. before: another
    revision that was read with the same settings. If a file is the same in both revisions, its rows
    are taken from `before`, which saves time. Raises DataError if a pattern in the settings or the
    dataset card cannot be understood.
    """
    card = (folder / CARD).read_text("utf-8", "replace") if CARD in files else ""
    paths = frozenset(files)
    found = sort_files(paths, settings, card)
    columns = RowColumns.of(settings.columns)
    by_file: dict[str, tuple[Row, ...]] = {}
    for file in chain.from_iterable(found.splits.values()):
        if target := _link_target(folder, file, paths):
            reason = f"it is a symbolic link to {target}; put the file itself in its place"
            on_error(DataError.at(file, None, reason))
            by_file[file] = ()
        elif before is not None and _is_same(folder, before, file):
            by_file[file] = before.by_file[file]
        else:
            limit = settings.max_row_bytes
            rows = read_file(folder, file, limit, columns, on_error, columns.reads)
            by_file[file] = tuple(rows)
    return Dataset(folder=folder, files=found, by_file=by_file)


def _link_target(folder: Path, file: str, paths: frozenset[str]) -> str | None:
    """The file to which `file` is a symbolic link. None if it is no link.

    In a commit, and in a job's download of it, a link is a small file that contains nothing but the
    path of its target. Without this check, a `.txt` link would be learned as a text."""
    path = folder / file
    if path.stat().st_size > MAX_LINK_BYTES:
        return None
    content = path.read_bytes().decode("utf-8", "replace")
    target = posixpath.normpath(posixpath.join(posixpath.dirname(file), content))
    return target if target in paths and target != file else None


def _is_same(folder: Path, before: Dataset, file: str) -> bool:
    return file in before.by_file and filecmp.cmp(folder / file, before.folder / file, False)


def check_not_empty(dataset: Dataset) -> None:
    """Raises DataError if there is no row to train on."""
    if dataset.train:
        return
    files = dataset.files
    if places := [
        row.place for row in dataset.nothing_to_learn if row.file in files.splits["train"]
    ]:
        raise DataError(
            f"no row has anything to learn: {', '.join(places[:5])}; push rows with a text that is "
            "not empty, or with an answer after the first message"
        )
    if held_out := [*files.splits["validation"], *files.splits["test"]]:
        raise DataError(
            f"no row is left to train on: {', '.join(held_out[:5])} are held out, as their names, "
            f"{CARD} or [pipelines.data.splits] say; rename them, or set "
            'train = ["**"] under [pipelines.data.splits]'
        )
    what = ", ".join(files.splits["train"][:5])
    ignored = (f"; {file} is ignored: {why}" for file, why in list(files.ignored.items())[:3])
    raise DataError(
        f"the dataset is empty: {f'no row in {what}' if what else 'no data file in it'}; push "
        f"{', '.join(SUFFIXES)} files with {KNOWN}{''.join(ignored)}"
    )
