"""Decides what the token of an API request may do, before the request gets to its route.

The decision is made from the method and the path. In four cases they are not enough, and the route
checks again. Only the body of a git LFS batch says whether the batch reads or writes, and only the
body about a webhook says whether it sets secrets. A list must show only the repositories that the
token reaches. And while a body comes in, the repository may be replaced by another one. For
requests of git, `git_http.py` decides.
"""

from collections.abc import Collection

from starlette.concurrency import run_in_threadpool
from starlette.types import Scope

from pipeline.hub.errors import Forbidden, RepositoryNotFound, Unauthorized
from pipeline.hub.repositories.names import RepositoryName
from pipeline.hub.repositories.store import Repository
from pipeline.hub.routes.paths import api_path, file_path_of, type_of
from pipeline.hub.service import Hub
from pipeline.hub.tokens.auth import OF_ITS_BODY_ONLY, READING, Identity, check_sees, out_of_reach
from pipeline.hub.unsupported import BESIDE_REPOSITORIES

_HUBS_TOKEN_ONLY = ("/api/settings/tokens", "/api/settings/gc", "/api/settings/purge")
_CLOSED_TO_JOBS = ("/api/settings/", "/settings/", "/api/repos/delete", "/api/repos/move")
"""Beginnings of the paths that a job may not use: a job may only read and write repositories."""
_LFS_BATCH = "/info/lfs/objects/batch"
_OF_NO_REPOSITORY = frozenset({"/api/whoami-v2", "/api/settings/repositories"})
"""Paths that name no repository. A token that is limited to some repositories may use them too."""


async def check(hub: Hub, identity: Identity, scope: Scope, verbs: Collection[str]) -> None:
    """Raises Forbidden for what the token may not do, Unauthorized for what needs a token, and
    RepositoryNotFound for a repository that the token does not reach.

    `verbs` are the words that may follow the repository's name in a path, such as `tree`.
    """
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
    """Whether a POST may be a request that changes nothing. True for every batch of git LFS,
    because only its body says whether it changes something, and `lfs.py` reads the body. False for
    other methods."""
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
        or path in BESIDE_REPOSITORIES
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
            f"The token {identity.token_name!r} is only for some repositories, and {path} does not "
            "belong to one of them: use another token."
        )


def _find(hub: Hub, identity: Identity, named: RepositoryName, *, as_git: bool) -> Repository:
    try:
        if as_git:
            return hub.find_as_git(named.type, named.owner, named.name)
        return hub.find(named)
    except RepositoryNotFound:
        raise out_of_reach(identity, named) from None
