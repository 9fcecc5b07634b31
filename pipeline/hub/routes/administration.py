"""API routes that need the hub's own token. The commands `pipeline hub tokens`, `gc` and `purge`
call them while the hub runs."""

from collections import Counter

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import JSONResponse

from pipeline.hub.garbage import collect_garbage, plan_purge, purge
from pipeline.hub.http_json import Json
from pipeline.hub.repositories import Repository
from pipeline.hub.routes.contents import described
from pipeline.hub.service import HubOf, Locked, hubs_own
from pipeline.hub.tokens import create_token, list_tokens, revoke_token

_PURGE = "/purge/{repository:typed_repository}/{sha}"

router = APIRouter(prefix="/api/settings", dependencies=[Depends(hubs_own)])


@router.get("/tokens")
def show_tokens(hub: HubOf) -> list[Json]:
    return list_tokens(hub.database, hub.repositories)


@router.post("/tokens/{name:part}")
def create(
    hub: HubOf, name: str, role: str = "read", repositories: str | None = None
) -> JSONResponse:
    """Creates a token for `repositories`, such as `dataset:local/facts,…`. Without them, it is for
    all repositories. An empty `repositories` is an error, so that a script whose variable is empty
    gets no token for everything."""
    reaches = [] if repositories is None else repositories.split(",")
    made = create_token(hub.database, hub.repositories, name, role, reaches)
    return JSONResponse(made, headers={"Cache-Control": "no-store"})


@router.delete("/tokens/{name:part}")
def revoke(hub: HubOf, name: str) -> Json:
    return revoke_token(hub.database, name)


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
@router.post(_PURGE)
def purge_commit(request: Request, hub: HubOf, repository: Locked, sha: str) -> Json:
    """Removes a commit that was pushed by mistake. With GET, only says what a purge would remove.
    The answer is 409 if the history of a branch, a tag or an open pull request still has the
    commit."""
    act = plan_purge if request.method == "GET" else purge
    answer = act(repository, hub.database, sha)
    described.cache_clear()  # it may hold the card of a removed commit
    return dict(answer)
