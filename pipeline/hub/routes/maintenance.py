"""API routes for the commands `pipeline hub gc` and `pipeline hub purge` while the hub runs."""

from collections import Counter
from collections.abc import Callable, Collection

from fastapi import APIRouter, Depends

from pipeline.hub.discussions import open_refs
from pipeline.hub.garbage import (
    Purge,
    collect_garbage,
    plan_purge,
    purge,
)
from pipeline.hub.http_json import Json
from pipeline.hub.repositories import Repository
from pipeline.hub.routes.access import Locked, hubs_own
from pipeline.hub.routes.contents import described
from pipeline.hub.service import Hub, HubOf

_PURGE = "/purge/{repository:typed_repository}/{sha}"

router = APIRouter(prefix="/api/settings", dependencies=[Depends(hubs_own)])


@router.post("/gc")
async def gc(hub: HubOf) -> Json:
    """Cleans all repositories: removes the commits that are on no branch any more and that no
    release, job or stored event needs, and the large files that no commit names. Pushes to a
    repository wait while it is cleaned."""
    removed = Counter(released=0, large_bytes=0)

    def collect(repository: Repository) -> None:
        removed.update(collect_garbage(repository, hub.database, hub.needed_commits))

    await hub.repositories.for_each(hub.database, collect)
    return {**removed}


@router.get(_PURGE)
def plan(hub: HubOf, repository: Locked, sha: str) -> Json:
    """What a purge of a commit would remove. A purge removes a commit that was pushed by mistake.
    The answer is 409 if the history of a branch, a tag or an open pull request still has the
    commit."""
    return _act(hub, repository, sha, plan_purge)


@router.post(_PURGE)
def remove(hub: HubOf, repository: Locked, sha: str) -> Json:
    answer = _act(hub, repository, sha, purge)
    described.cache_clear()  # it may hold the card of a removed commit
    return answer


def _act(
    hub: Hub,
    repository: Repository,
    sha: str,
    act: Callable[[Repository, str, Collection[str]], Purge],
) -> Json:
    with hub.database.read() as connection:
        refs = open_refs(connection, repository)
    return dict(act(repository, sha, refs))
