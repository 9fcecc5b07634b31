"""Parses the path of a request: finds the name of the repository, and what the request asks of it.

A path without an owner, such as `/api/datasets/facts/tree/main`, means a repository of the hub's
owner. Such a path can have two meanings: `facts/tree` may also be the repository `tree` of the
owner `facts`. So if the second segment is a verb (a word such as `tree` that selects a route), the
parser asks the database whether the repository `facts/tree` exists.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from starlette.convertors import PathConvertor, register_url_convertor

from pipeline.hub.errors import RepositoryNotFound
from pipeline.hub.repositories.names import (
    REPOSITORY_TYPES,
    RepositoryName,
    RepositoryType,
    requested_name,
    segments,
)
from pipeline.hub.unsupported import UNSUPPORTED_VERBS


class _AnyText(PathConvertor):
    """Matches any text, also with line feeds: names of files may have them, but Starlette's `path`
    does not match them."""

    regex = r"[\s\S]*"


register_url_convertor("anytext", _AnyText())

FILE_VERBS = frozenset({"resolve", "raw", "info"})
# A verb is the segment after the repository's name. Only these verbs can be the last segment of a
# path. Any other verb needs arguments, so a last segment such as `tree` is a repository's name.
_BARE_VERBS = frozenset({"refs", "settings", "auth-check", "discussions"})

IsThere = Callable[[RepositoryName], bool]


@dataclass(frozen=True, kw_only=True)
class RepositoryPath:
    name: RepositoryName
    rest: tuple[str, ...]
    """The decoded segments after the name. The first one is the verb."""


def api_path(
    raw_path: bytes, verbs: Collection[str], owner: str, is_there: IsThere
) -> RepositoryPath:
    """Parses `/api/<type>s/[<owner>/]<name>[/<verb>/…]`. `owner` is the hub's owner, for a path
    without an owner. Raises RepositoryNotFound for a path that names no repository."""
    parts = segments(raw_path)
    type = type_of(parts[1])
    if type is None or len(parts) < 3:
        raise RepositoryNotFound(
            f"/{'/'.join(parts)} names no repository: write "
            "/api/datasets, /api/models or /api/spaces, then /owner/name."
        )

    def ends_the_name(verb: str) -> bool:
        if verb in UNSUPPORTED_VERBS:
            return True
        return verb in verbs and (len(parts) > 4 or verb in _BARE_VERBS)

    return _parsed(parts, 2, type, ends_the_name, owner, is_there)


def file_path_of(raw_path: bytes, owner: str, is_there: IsThere) -> RepositoryPath | None:
    """Parses `/[<type>s/][<owner>/]<name>/<verb>/…`. Returns None if the path has none of the
    `FILE_VERBS`."""
    parts = segments(raw_path)
    type = type_of(parts[0])
    start = 0 if type is None else 1
    if not FILE_VERBS.intersection(parts[start + 1 : start + 3]):
        return None

    def ends_the_name(verb: str) -> bool:
        return verb in FILE_VERBS

    return _parsed(parts, start, type or "model", ends_the_name, owner, is_there)


def type_of(plural: str) -> RepositoryType | None:
    return next((type for type in REPOSITORY_TYPES if f"{type}s" == plural), None)


def _parsed(
    parts: list[str],
    start: int,
    type: RepositoryType,
    ends_the_name: Callable[[str], bool],
    owner: str,
    is_there: IsThere,
) -> RepositoryPath:
    num_segments = 2
    if len(parts) == start + 1:
        num_segments = 1
    elif ends_the_name(parts[start + 1]):
        try:
            full = requested_name(type, parts[start], parts[start + 1])
            num_segments = 2 if is_there(full) else 1
        except RepositoryNotFound:
            num_segments = 1
    named = parts[start : start + num_segments]
    end = start + num_segments
    if parts[end : end + 1] == ["info"]:  # `git lfs` sends requests to `<name>.git/info/lfs`
        named[-1] = named[-1].removesuffix(".git")
    return RepositoryPath(
        name=requested_name(type, *(named if num_segments == 2 else (owner, *named))),
        rest=tuple(parts[end:]),
    )
