"""Finds the files of a dataset that hold rows, and the split of each file (train, validation or
test).

The split comes from the settings. If they set no split, it comes from the dataset card. If the card
names no files, it comes from the names of folders and files, with the conventions of the library
`datasets`.
"""

import posixpath
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, get_args

import yaml

from pipeline.formats import HEAD, HeadLoader
from pipeline.retrain.errors import DataError
from pipeline.retrain.settings import DataSettings, SplitSettings

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)
CARD = "README.md"
SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".txt")
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
MAX_QUOTED = 400
"""A message quotes at most this many characters of what the dataset card says."""
SET_OFF_BY = "-._ 0-9"
KEYWORDS: Mapping[Split, tuple[str, ...]] = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Words in the names of folders and files that tell the split. They are copied from
`datasets.data_files`, because importing that module takes a second."""
_KEYWORDS = {
    split: re.compile(rf"(^|[{SET_OFF_BY}])({'|'.join(keywords)})($|[{SET_OFF_BY}])")
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


def suffix_of(path: str) -> str:
    """The suffix in lower case, without that of a compression: `.jsonl` for `a.jsonl.gz`."""
    name = path.rpartition("/")[2].lower()
    for compression in COMPRESSIONS:
        name = name.removesuffix(compression)
    _, dot, suffix = name.rpartition(".")
    return dot + suffix if dot else ""


def sort_files(files: Iterable[str], settings: DataSettings, card: str = "") -> DataFiles:
    """Divide `files`, the paths of all files in a repository, into splits and ignored files.

    card: the content of README.md. Raises DataError if a pattern or the card cannot be understood.
    """
    find_split, otherwise = (
        _by_settings(settings.splits) or _by_card(card, settings.config) or (_by_name, "")
    )
    is_wanted = _any_of(settings.files, "[pipelines.data] files")
    splits: dict[Split, list[str]] = {split: [] for split in SPLITS}
    ignored = {}
    for file in sorted(files):
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
        known = _short(", ".join(map(str, configs))) or "none"
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
    return DataError.at(CARD, None, f"its head cannot be understood ({_short(str(error))})")


def _short(text: str) -> str:
    """The beginning of a text that may quote the whole head, in one line."""
    line = " ".join(text.split())
    return line if len(line) <= MAX_QUOTED else f"{line[:MAX_QUOTED]}…"


def _by_config(config: Mapping[str, Any]) -> _Finder | None:
    folder = posixpath.normpath(str(config.get("data_dir") or "").strip("/"))
    folder = "" if folder == "." else folder
    files = config.get("data_files")
    if files is None:
        if not folder:
            return None
        return lambda path: (
            _by_name(path.removeprefix(f"{folder}/")) if path.startswith(f"{folder}/") else None
        )
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
        inside = [f"{folder}/{pattern}" if folder else pattern for pattern in patterns]
        by_split.setdefault(_split_called(name) or "train", []).extend(inside)
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
            problem = _short(f"{pattern!r} is no pattern of files: {error}")
            raise DataError(f"{said_by}: {problem}") from error
    return lambda path: any(each.match(path) for each in compiled)


def _by_name(path: str) -> Split:
    """The split of a file by keywords in the names of its folders, then in its own name. A file
    without a keyword is in the train split.

    This differs from `datasets`: if one file has a keyword in its name, `datasets` ignores all
    files without a keyword. Here, every file that is pushed is learned.
    """
    *folders, name = path.split("/")
    called = map(_split_called, (*reversed(folders), name))
    return next(filter(None, called), "train")


def _split_called(name: str) -> Split | None:
    """The split whose keyword is in the name. A dot, a dash, a blank, an underscore or a digit must
    separate the keyword from the rest of the name."""
    return next((split for split in SPLITS if _KEYWORDS[split].search(name)), None)
