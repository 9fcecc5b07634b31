"""Names that come from outside: repositories, revisions, files. Checked here, before any use."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args
from urllib.parse import unquote_to_bytes

from pipeline.hub.errors import BadRequest, RepositoryNotFound

RepositoryType = Literal["dataset", "model", "space"]
REPOSITORY_TYPES: tuple[RepositoryType, ...] = get_args(RepositoryType)
DEFAULT_BRANCH = "refs/heads/main"
SHA = re.compile(r"[0-9a-f]{40}")

# As huggingface_hub.utils.validate_repo_id has it, for either half of `owner/name`.
_NAME = re.compile(r"(?!.*(--|\.\.))(?![.-])[A-Za-z0-9._-]{1,96}(?<![.-])")
RESERVED_OWNERS = frozenset(
    {
        *(f"{type}s" for type in REPOSITORY_TYPES),
        *("api", "settings", "buckets", "collections", "oauth", "papers", "uploads"),
    }
)
"""First parts of addresses that mean something else. In lower case."""
# What git check-ref-format forbids, and so everything that git would read as an expression.
_FORBIDDEN_IN_REF = re.compile(r"[\x00-\x20\x7f~^:?*\[\\]|\.\.|@\{|//|^[-/.]|/\.|[./]$|\.lock(/|$)")
_IGNORED_BY_HFS = re.compile("[\u200c-\u200f\u202a-\u202e\u206a-\u206f\ufeff]")
MAX_PATH_BYTES = 4000
MAX_FOLDER_CHARACTERS = 32 * 1024 * 1024
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


@dataclass(frozen=True, kw_only=True)
class RepositoryName:
    type: RepositoryType
    owner: str
    name: str

    @property
    def id(self) -> str:
        """`owner/name`, as clients say it."""
        return f"{self.owner}/{self.name}"

    @property
    def path(self) -> str:
        """Below the hub's URL: `datasets/owner/name`, `owner/name` for a model."""
        return self.id if self.type == "model" else f"{self.type}s/{self.id}"

    def __str__(self) -> str:
        return f"{self.type} {self.id}"


def repository_name(type: str, owner: str, name: str) -> RepositoryName:
    """Raises BadRequest for what can be no repository's name."""
    if type not in REPOSITORY_TYPES:
        raise BadRequest(
            f"{type!r} is no type of repository: choose one of {', '.join(REPOSITORY_TYPES)}."
        )
    for part in (owner, name):
        if not _NAME.fullmatch(part) or part.endswith(".git"):
            raise BadRequest(
                f"{f'{owner}/{name}'!r} is no repository name: use owner/name, each of 1 to "
                "96 letters, digits, '-', '_' and '.', without '--' or '..', not ending in '.git'."
            )
    return RepositoryName(type=type, owner=owner, name=name)


def requested_name(type: RepositoryType, owner: str, name: str) -> RepositoryName:
    """As `repository_name`, where a bad name is simply one that does not exist."""
    try:
        return repository_name(type, owner, name)
    except BadRequest as error:
        raise RepositoryNotFound(f"No {type} {f'{owner}/{name}'!r} here. {error}") from None


def segments(raw_path: bytes) -> list[str]:
    """The decoded segments of a request's path; an encoded slash stays inside its segment."""
    try:
        return [unquote_to_bytes(part).decode() for part in raw_path.strip(b"/").split(b"/")]
    except UnicodeDecodeError:
        raise BadRequest(f"The path {raw_path!r} is not UTF-8 once decoded.") from None


def is_ref_name(name: str) -> bool:
    """Whether git would take `name` below `refs/heads/` or `refs/tags/`."""
    return bool(name) and not _FORBIDDEN_IN_REF.search(name)


def parents_of(path: str) -> list[str]:
    """The folders on the way to `path`, without the root: `a/b/c` has `a` and `a/b`."""
    pieces = path.split("/")
    return ["/".join(pieces[:depth]) for depth in range(1, len(pieces))]


def folders_of(paths: Iterable[str]) -> set[str]:
    """Every folder on the way to each of `paths`, and the root (`""`). Raises BadRequest if their
    names together would fill the memory: a path of 4,000 bytes may have 2,000 folders."""
    folders, num_characters = {""}, 0
    for path in paths:
        for folder in reversed(parents_of(path)):
            if folder in folders:
                break
            folders.add(folder)
            num_characters += len(folder)
        if num_characters > MAX_FOLDER_CHARACTERS:
            raise BadRequest(
                f"The names of all folders have more than {MAX_FOLDER_CHARACTERS} characters: nest "
                "the folders less deeply, or send fewer files at once."
            )
    return folders


def new_file_path(path: str) -> str:
    """A path that a commit may add or delete. Raises BadRequest for one that git cannot check out
    on every system."""
    checked = file_path([path])
    if _SURROGATE.search(path):
        raise BadRequest(
            f"{path!r} is no path of a file: it has half of a character (a surrogate)."
        )
    if len(path.encode()) > MAX_PATH_BYTES:
        raise BadRequest(f"{path[:100]!r}… has more than {MAX_PATH_BYTES} bytes.")
    for piece in checked.split("/"):
        # Some file systems ignore these characters, so `.g\u200cit` is git's own folder there.
        plain = _IGNORED_BY_HFS.sub("", piece).partition(":")[0].rstrip(" .").casefold()
        if plain in (".git", "git~1"):
            raise BadRequest(f"{path!r} leads into git's own folder: choose another name.")
    return checked


def file_path(parts: Sequence[str]) -> str:
    """The parts of a path inside a repository, joined. Raises BadRequest for a path no tree has."""
    path = stored_path(parts)
    if _CONTROL.search(path):
        raise BadRequest(f"{path!r} is no path of a file: it has a control character.")
    return path


def stored_path(parts: Sequence[str]) -> str:
    """As `file_path`, for what is only read: a push may bring names with control characters."""
    path = "/".join(parts)
    if "\0" in path or any(piece in ("", ".", "..") for piece in path.split("/")):
        raise BadRequest(f"{path!r} is no path of a file in a repository.")
    return path
