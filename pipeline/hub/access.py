"""What the token of a request lets it do, decided before any route sees the request.

A route need not ask again. Two kinds of routes ask what cannot be told from the path: a POST of git
LFS may read or write, and a list shows only what the token reaches.
"""

from collections.abc import Collection

from starlette.concurrency import run_in_threadpool
from starlette.types import Scope

from pipeline.hub.auth import OF_ITS_BODY_ONLY, READING, Identity, check_sees, out_of_reach
from pipeline.hub.errors import (
    Forbidden,
    RepositoryMoved,
    RepositoryNotFound,
    Unauthorized,
)
from pipeline.hub.names import RepositoryName
from pipeline.hub.repositories import Repository
from pipeline.hub.repository_paths import api_path, file_path_of, type_of
from pipeline.hub.service import Hub

_HUBS_TOKEN_ONLY = ("/api/settings/tokens", "/api/settings/gc", "/api/settings/purge")
_CLOSED_TO_JOBS = ("/api/settings/", "/settings/", "/api/repos/delete", "/api/repos/move")
"""A job reads and writes repositories. What else the hub does is a person's to change."""
_LFS_BATCH = "/info/lfs/objects/batch"
_OF_NO_REPOSITORY = frozenset({"/api/whoami-v2", "/api/settings/repositories"})
"""What a token that reaches some repositories only may ask for beside them."""


async def check(hub: Hub, identity: Identity, scope: Scope, verbs: Collection[str]) -> None:
    """Raises Forbidden, Unauthorized where there is no token, and RepositoryNotFound for a
    repository that the token does not reach. `verbs` are those of the API's paths."""
    if identity.owns_hub:
        return
    path: str = scope["path"]
    if path.startswith(_HUBS_TOKEN_ONLY) and not identity.is_anonymous:
        raise Forbidden(f"{path} needs the hub's own token, which `pipeline env` prints.")
    if identity.job_id is not None and path.startswith(_CLOSED_TO_JOBS):
        raise Forbidden(
            f"This is the token of job {identity.job_id}, which may read and write repositories "
            f"and nothing else: {path} needs the hub's token."
        )
    if scope["method"] not in READING and not await run_in_threadpool(
        _may_only_read, hub, scope, verbs
    ):
        identity.require_write(f"{scope['method']} {path}")
    if identity.is_limited:
        await run_in_threadpool(_check_reach, hub, identity, scope, verbs)


def _may_only_read(hub: Hub, scope: Scope, verbs: Collection[str]) -> bool:
    """Whether a request that is no GET changes nothing; of git LFS, its route decides."""
    path: str = scope["path"]
    if scope["method"] != "POST":
        return False
    if path == OF_ITS_BODY_ONLY:
        return True
    if not path.startswith("/api/"):
        return path.endswith(_LFS_BATCH)
    if "/paths-info/" not in path or not _is_of_repository(path):
        return False
    asked = api_path(scope["raw_path"], verbs, hub.settings.owner, hub.is_there)
    return asked.rest[:1] == ("paths-info",)


def _is_of_repository(path: str) -> bool:
    parts = path.split("/")
    return len(parts) > 3 and parts[1] == "api" and type_of(parts[2]) is not None


def _check_reach(hub: Hub, identity: Identity, scope: Scope, verbs: Collection[str]) -> None:
    path, raw, owner = scope["path"], scope["raw_path"], hub.settings.owner
    is_list = path.startswith("/api/") and type_of(path.removeprefix("/api/").rstrip("/"))
    if (
        is_list
        or path == OF_ITS_BODY_ONLY
        or (path in _OF_NO_REPOSITORY and not identity.is_anonymous)
    ):
        return
    asked = None
    if _is_of_repository(path):
        asked = api_path(raw, verbs, owner, hub.is_there)
    elif not path.startswith("/api/"):
        asked = file_path_of(raw, owner, hub.is_there)
    if asked is not None:
        is_lfs = asked.rest[:2] == ("info", "lfs")
        check_sees(identity, asked.name, _find(hub, identity, asked.name, as_git=is_lfs))
    elif identity.is_anonymous:
        raise Unauthorized(f"{path} needs a token: set HF_TOKEN, or run `pipeline env`.")
    else:
        raise Forbidden(
            f"The token {identity.token_name!r} reaches some repositories and nothing else: {path} "
            "needs another token."
        )


def _find(hub: Hub, identity: Identity, named: RepositoryName, *, as_git: bool) -> Repository:
    """Under its present name, too: the route answers with a redirect then."""
    try:
        if as_git:
            return hub.find_as_git(named.type, named.owner, named.name)
        return hub.find(named)
    except RepositoryMoved as moved:
        return hub.find_by_id(moved.repository_id)
    except RepositoryNotFound:
        raise out_of_reach(identity, named) from None
