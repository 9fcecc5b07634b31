"""Checks the names that clients send: of repositories, revisions and files."""

import re
from dataclasses import dataclass
from typing import Literal, get_args

from pipeline.hub.errors import BadRequest

RepositoryType = Literal["dataset", "model", "space"]
REPOSITORY_TYPES: tuple[RepositoryType, ...] = get_args(RepositoryType)
DEFAULT_BRANCH = "refs/heads/main"
SHA = re.compile(r"[0-9a-f]{40}")

# The rule of `huggingface_hub.utils.validate_repo_id`, for either half of `owner/name`.
_NAME = re.compile(r"(?!.*(--|\.\.))(?![.-])[A-Za-z0-9._-]{1,96}(?<![.-])")
RESERVED_OWNERS = frozenset(
    {
        *(f"{type}s" for type in REPOSITORY_TYPES),
        *("api", "settings", "buckets", "collections", "oauth", "papers", "uploads"),
    }
)
"""Owners that no repository may have, because URLs that begin with them mean something else. In
lower case."""
# What `git check-ref-format` forbids in a name. So a name cannot be an expression such as `main~1`.
_FORBIDDEN_IN_REF = re.compile(
    r"[\x00-\x20\x7f\ud800-\udfff~^:?*\[\\]|\.\.|@\{|//|^[-/.]|/\.|[./]$|\.lock(/|$)"
)
_IGNORED_BY_HFS = re.compile("[\u200c-\u200f\u202a-\u202e\u206a-\u206f\ufeff]")
# `.gitmodules`, and its short names on Windows.
_GITMODULES = re.compile(r"\.gitmodules|gitmod~[1-4]|gi7eba~\d")
_MAX_REF_BYTES = 2000
_MAX_REF_PART_BYTES = 250
"""Git stores a ref as a file, and locks it by a second file with `.lock` added to its name. The
name of a file may have 255 bytes."""
_MAX_PATH_BYTES = 4000
_MAX_DEPTH = 100
_NOT_IN_PATH = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")


@dataclass(frozen=True, kw_only=True)
class RepositoryName:
    type: RepositoryType
    owner: str
    name: str

    @property
    def id(self) -> str:
        """`owner/name`, which clients call the repository's id."""
        return f"{self.owner}/{self.name}"

    @property
    def path(self) -> str:
        """The path after the hub's URL: `owner/name` for a model, `datasets/owner/name` or
        `spaces/owner/name` for the others."""
        return self.id if self.type == "model" else f"{self.type}s/{self.id}"

    def __str__(self) -> str:
        return f"{self.type} {self.id}"


def repository_name(type: str, owner: str, name: str) -> RepositoryName:
    """Raises BadRequest if a repository cannot have this type or name."""
    if type not in REPOSITORY_TYPES:
        raise BadRequest(
            f"{type!r} is not a type of repository: choose one of {', '.join(REPOSITORY_TYPES)}."
        )
    for part in (owner, name):
        if not _NAME.fullmatch(part) or part.endswith(".git"):
            raise BadRequest(
                f"{f'{owner}/{name}'!r} is not a valid repository name: use owner/name, each of 1 "
                "to 96 letters, digits, '-', '_' and '.', without '--' or '..', not beginning or "
                "ending with '-' or '.', not ending in '.git'."
            )
    return RepositoryName(type=type, owner=owner, name=name)


def is_ref_name(name: str) -> bool:
    """Whether git allows `name` as the name of a branch or a tag, and can store it."""
    if not name or _FORBIDDEN_IN_REF.search(name):
        return False
    parts = [len(part) for part in name.encode().split(b"/")]
    return max(parts) <= _MAX_REF_PART_BYTES and len(name.encode()) <= _MAX_REF_BYTES


def parents_of(path: str) -> list[str]:
    """The folders above `path`, without the root: `a` and `a/b` for `a/b/c`."""
    pieces = path.split("/")
    return ["/".join(pieces[:depth]) for depth in range(1, len(pieces))]


def new_file_path(path: str) -> str:
    """The path, if a commit over the API may add a file there. Raises BadRequest for a path that
    git cannot check out on every system, and for `.gitmodules`, whose content git would have to
    check."""
    checked = changed_path(path)
    for piece in re.split(r"[/\\]", checked):
        # Some file systems ignore certain characters, and so read `.g\u200cit` as `.git`. On
        # Windows, a backslash ends a folder's name. Git refuses such paths on every system.
        plain = _IGNORED_BY_HFS.sub("", piece).partition(":")[0].rstrip(" .").casefold()
        if plain in (".git", "git~1"):
            raise BadRequest(f"{path!r} leads into git's own folder: choose another name.")
        if _GITMODULES.fullmatch(plain):
            raise BadRequest(f"{path!r} describes submodules: add it by a push with git.")
    return checked


def changed_path(path: str) -> str:
    """The path, if a commit over the API may add or delete something there. A commit may delete a
    file that it may not add, because a push may have added it. Raises BadRequest."""
    if _NOT_IN_PATH.search(path):
        raise BadRequest(
            f"{path!r} is not a valid path: it has a control character, or half of a character (a "
            "surrogate). Rename the file."
        )
    if not is_path(path):
        raise BadRequest(
            f"{path!r} is not a path of a file in a repository: write folder/file, without an "
            "empty part, '.' or '..'."
        )
    if len(path.encode()) > _MAX_PATH_BYTES or path.count("/") > _MAX_DEPTH:
        raise BadRequest(
            f"The path {path[:100]!r}… has more than {_MAX_PATH_BYTES} bytes or {_MAX_DEPTH} "
            "folders: shorten it, or nest the folders less deeply."
        )
    return path


def is_path(path: str) -> bool:
    """Whether a client can ask for a file with this path."""
    return not _NOT_IN_PATH.search(path) and {"", ".", ".."}.isdisjoint(path.split("/"))
