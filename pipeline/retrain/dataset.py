"""`Dataset`: the rows of one dataset revision, by split (train, validation, test).

Also finds the files that hold rows, and the split of each. The split comes from the settings. If
they set no split, it comes from the dataset card. If the card names no files, it comes from the
names of folders and files, with the conventions of the library `datasets`.
"""

import filecmp
import posixpath
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from pipeline.formats import HEAD, HeadLoader
from pipeline.retrain.columns import KNOWN, RowColumns
from pipeline.retrain.errors import DataError, fail
from pipeline.retrain.reading import COMPRESSIONS, read_file, suffix_of
from pipeline.retrain.rows import Row
from pipeline.retrain.settings import DataSettings, SplitSettings

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)
CARD = "README.md"
SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".txt")
MAX_QUOTED = 400
"""A message quotes at most this many characters of what the dataset card says."""
MAX_LINK_BYTES = 1_024
"""A symbolic link with a longer path is not recognized."""
SET_OFF_BY = "-._ 0-9"
KEYWORDS: Mapping[Split, tuple[str, ...]] = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Words in the names of folders and files that tell the split. They are copied from
`datasets.data_files`, because importing that module takes a second."""
_KEYWORDS = {
    split: re.compile(rf"(^|[{SET_OFF_BY}])({'|'.join(keywords)})($|[{SET_OFF_BY}])", re.I)
    for split, keywords in KEYWORDS.items()
}
NEEDED = (
    CARD,
    *(
        "*" + re.sub("[a-z]", lambda letter: f"[{letter[0]}{letter[0].upper()}]", name)
        for suffix in SUFFIXES
        for name in (suffix, *(suffix + compression for compression in COMPRESSIONS))
    ),
)
"""Patterns of the files that a job fetches: the dataset card, and files with one of the suffixes,
in upper or lower case."""
_ABOUT = re.compile(
    r"(?i:README\..*)|(?i:README|LICEN[CS]E|COPYING)([-_.][^.]*)?(\.txt|\.md|\.rst)?"
    r"|(NOTICE|AUTHORS|CHANGELOG|CITATION|CONTRIBUTING|CODE_OF_CONDUCT|SECURITY)(\.\w+)?"
    r"|(?i:requirements[^/]*\.txt|constraints\.txt|robots\.txt)|CMakeLists\.txt"
)
"""Names of files about the repository, such as README and LICENSE. They hold no rows, whatever
their suffix."""
_SETTINGS = frozenset(
    {
        *("config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json"),
        *("state.json", "package.json", "package-lock.json", "tsconfig.json", "settings.json"),
    }
)
"""Names of settings files of programs, which hold no rows. `datasets` ignores the first four
too."""


@dataclass(frozen=True, kw_only=True)
class DataFiles:
    splits: Mapping[Split, tuple[str, ...]]
    """Files that hold rows, in the order of their names."""
    ignored: Mapping[str, str]
    """File → why it is not read."""


def is_needed(path: str) -> bool:
    """Whether a job fetches the file: it may hold rows, or it is the dataset card."""
    return path == CARD or suffix_of(path) in SUFFIXES


def shown(path: str) -> str:
    """The path with a `?` in the place of each byte that is not UTF-8."""
    return path.encode(errors="replace").decode()


def sort_files(files: Iterable[str], settings: DataSettings, card: str = "") -> DataFiles:
    """Divide `files`, the paths of all files in a repository, into splits and ignored files.

    card: the content of README.md. Raises DataError if a pattern or the card cannot be understood,
    or the settings name a file whose suffix is none of SUFFIXES.
    """
    find_split, otherwise = (
        _by_settings(settings.splits) or _by_card(card, settings.config) or (_by_name, "")
    )
    is_wanted = _any_of(settings.files, "[pipelines.data] files")
    splits: dict[Split, list[str]] = {split: [] for split in SPLITS}
    ignored = {}
    for file in sorted(files):
        if file in settings.files and suffix_of(file) not in SUFFIXES:
            problem = f"{file!r} has no rows; they are read from {', '.join(SUFFIXES)} files"
            raise DataError(f"[pipelines.data] files: {problem}")
        # A file that the settings name in full is read, even if its name looks like no data.
        reason = None if file in settings.files else why_no_data(file)
        if reason is None and not is_wanted(file):
            reason = "not in [pipelines.data] files"
        split = None if reason is not None else find_split(file)
        if split is not None:
            splits[split].append(file)
        else:
            ignored[file] = reason or otherwise
    return DataFiles(
        splits={split: tuple(found) for split, found in splits.items()}, ignored=ignored
    )


def why_no_data(path: str) -> str | None:
    """Why a file with this name holds no rows. None if it may hold rows."""
    *folders, name = path.split("/")
    if any(part.startswith(".") for part in (*folders, name)):
        return "hidden"
    if any(folder.startswith("__") for folder in folders):
        return "in a folder that begins with __"
    if _ABOUT.fullmatch(name):
        return "about the repository"
    if name.lower() in _SETTINGS:
        return "settings of a program"
    suffix = suffix_of(name)
    if suffix not in SUFFIXES:
        return f"no rows are read from {suffix} files" if suffix else "its name has no suffix"
    if suffix == ".parquet" and not name.lower().endswith(suffix):
        return "parquet is compressed inside, and is not read from a compressed file"
    return None


_Finder = Callable[[str], Split | None]


def _by_settings(settings: SplitSettings) -> tuple[_Finder, str] | None:
    given: Any = settings.model_dump(exclude_none=True)
    if not given:
        return None
    patterns: dict[Split, tuple[str, ...]] = {"train": ("**",), **given}
    return _finder(patterns, "[pipelines.data.splits]"), "in no split of [pipelines.data.splits]"


def _by_card(card: str, config: str | None) -> tuple[_Finder, str] | None:
    """A function that finds the split of a file with the `configs` in the head of the dataset card,
    and the reason to ignore the other files. Uses the config that the settings name, otherwise the
    default config, otherwise all configs. None if the card does not say where the files are."""
    configs = _configs(card)
    if config is not None and config not in configs:
        known = shortened(", ".join(map(str, configs))) or "none"
        raise DataError(
            f"[pipelines.data] config is {config!r}, and {CARD} of the dataset has {known}; "
            "correct one of them"
        )
    default = config or next(
        (name for name, each in configs.items() if name == "default" or each.get("default")), None
    )
    chosen = configs if default is None else {default: configs[default]}
    finders = [finder for each in chosen.values() if (finder := _by_config(each)) is not None]
    if not finders or len(finders) < len(chosen):
        return None

    def find(path: str) -> Split | None:
        found = {finder(path) for finder in finders}
        return next((split for split in SPLITS if split in found), None)

    return find, f"not among the data_files of {CARD}"


def _configs(card: str) -> dict[str, dict[str, Any]]:
    found = HEAD.match(card)
    if found is None:
        return {}
    from datasets.utils.metadata import MetadataConfigs

    try:
        data = yaml.load(found[2], HeadLoader) or {}
        if not isinstance(data, dict):
            raise ValueError("it must be a mapping, `key: value` lines")
        return dict(MetadataConfigs.from_dataset_card_data(data))
    except Exception as error:
        # The YAML library and the libraries that use it have many error classes with no common
        # base.
        raise _not_understood(error) from error


def _not_understood(error: Exception) -> DataError:
    return DataError.at(CARD, None, f"its head cannot be understood ({shortened(str(error))})")


def shortened(text: str, most: int = MAX_QUOTED) -> str:
    """The beginning of a text, in one line. An error may quote the whole head of a card."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[:most]}…"


def _by_config(config: Mapping[str, Any]) -> _Finder | None:
    if folder := config.get("data_dir"):
        problem = f"its configs say `data_dir: {shortened(str(folder))}`, which is not read"
        raise DataError.at(CARD, None, f"{problem}; use `data_files` or [pipelines.data.splits]")
    files = config.get("data_files")
    if files is None:
        return None
    from datasets.data_files import sanitize_patterns

    try:
        by_name_of_split = sanitize_patterns(files)
        for pattern in chain.from_iterable(by_name_of_split.values()):
            if not isinstance(pattern, str):
                raise TypeError(f"data_files has {pattern!r}, which is no text")
    except (ValueError, TypeError) as error:
        raise _not_understood(error) from error
    by_split: dict[Split, list[str]] = {}
    for name, patterns in by_name_of_split.items():
        by_split.setdefault(_split_called(name) or "train", []).extend(patterns)
    return _finder(by_split, CARD)


def _finder(patterns: Mapping[Split, Iterable[str]], said_by: str) -> _Finder:
    # Test `train` last. Its pattern is often "all files", and the other splits are the exceptions.
    matchers = [
        (split, _any_of(patterns[split], said_by))
        for split in reversed(SPLITS)
        if split in patterns
    ]
    return lambda path: next((split for split, matches in matchers if matches(path)), None)


def _any_of(patterns: Iterable[str], said_by: str) -> Callable[[str], bool]:
    """A function that tells whether a path matches one of the patterns. Patterns have the same
    meaning as in `datasets`. The name of a folder matches all files in the folder."""
    from fsspec.utils import glob_translate

    compiled = []
    for pattern in patterns:
        plain = pattern.removeprefix("./").rstrip("/")
        try:
            compiled += [
                re.compile(glob_translate(each)) for each in dict.fromkeys((plain, f"{plain}/**"))
            ]
        except (ValueError, re.error) as error:
            problem = shortened(f"{pattern!r} is no pattern of files: {error}")
            raise DataError(f"{said_by}: {problem}") from error
    return lambda path: any(each.match(path) for each in compiled)


def _by_name(path: str) -> Split:
    """The split of a file by keywords in the names of its folders, then in its own name. A file
    without a keyword is in the train split.

    This differs from `datasets` in two ways. If one file has a keyword in its name, `datasets`
    ignores all files without a keyword; here, every file that is pushed is learned. And `datasets`
    knows the keywords in lower case only; here, a `Test.csv` is not trained on either.
    """
    *folders, name = path.split("/")
    called = map(_split_called, (*reversed(folders), name))
    return next(filter(None, called), "train")


def _split_called(name: str) -> Split | None:
    """The split whose keyword is in the name. A dot, a dash, a blank, an underscore or a digit must
    separate the keyword from the rest of the name."""
    return next((split for split in SPLITS if _KEYWORDS[split].search(name)), None)


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
    columns = RowColumns(settings.columns.model_dump(exclude_none=True))
    by_file: dict[str, tuple[Row, ...]] = {}
    for file in chain.from_iterable(found.splits.values()):
        if target := _link_target(folder, file, paths):
            reason = f"it is a symbolic link to {target}; put the file itself in its place"
            on_error(DataError.at(file, None, reason))
            by_file[file] = ()
        elif before is not None and _is_same(folder, before, file):
            by_file[file] = before.by_file[file]
        else:
            by_file[file] = tuple(read_file(folder, file, columns, on_error, columns.reads))
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
    splits, ignored = dataset.files.splits, dataset.files.ignored
    left_out = [f"{row.place} has nothing to learn" for row in dataset.nothing_to_learn]
    left_out += [
        f"{file} is held out, as its name, {CARD} or [pipelines.data.splits] says"
        for file in (*splits["validation"], *splits["test"])
    ]
    left_out += [f"{file} is ignored: {why}" for file, why in ignored.items()]
    raise DataError(
        f"the dataset is empty; push {', '.join(SUFFIXES)} files with {KNOWN}"
        + "".join(f"; {each}" for each in left_out[:5])
    )
