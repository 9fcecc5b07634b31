"""API routes for the commands `pipeline hub gc` and `pipeline hub purge` while the hub runs."""

from collections.abc import Callable, Collection

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from pipeline.hub.discussions.store import open_refs
from pipeline.hub.repositories.garbage import Collected, collect_garbage
from pipeline.hub.repositories.names import requested_name
from pipeline.hub.repositories.purge import Purge, plan_purge, purge
from pipeline.hub.repositories.store import Repository
from pipeline.hub.routes.listing import forget_cards
from pipeline.hub.service import hub_of
from pipeline.hub.tokens.auth import identity_of

_PURGE = "/api/settings/purge/{type}/{owner}/{name}/{sha}"


def routes() -> list[Route]:
    return [
        Route("/api/settings/gc", gc, methods=["POST"]),
        Route(_PURGE, plan, methods=["GET"]),
        Route(_PURGE, remove, methods=["POST"]),
    ]


async def gc(request: Request) -> Response:
    """Cleans all repositories. First the hub stops keeping the commits that are on no branch any
    more and that no release, job or stored event needs. Then it removes the objects that no ref
    leads to, and the large files that no commit names. Pushes to a repository wait while it is
    cleaned."""
    hub, collected = hub_of(request), list[Collected]()

    def collect(repository: Repository) -> None:
        collected.append(collect_garbage(repository, hub.database, hub.needed_commits))

    await hub.repositories.for_each(hub.database, collect)
    return JSONResponse(
        {
            "released": sum(each.num_commits for each in collected),
            "large_bytes": sum(each.large_bytes for each in collected),
        }
    )


async def plan(request: Request) -> Response:
    """What a purge of a commit would remove. A purge removes a commit that was pushed by mistake.
    The answer also has the `names` of the repository. It is 409 if the
    history of a branch, a tag or an open pull request still has the commit."""
    return await _locked(request, plan_purge)


async def remove(request: Request) -> Response:
    answer = await _locked(request, purge)
    forget_cards()
    return answer


async def _locked(
    request: Request, act: Callable[[Repository, str, Collection[str]], Purge]
) -> Response:
    hub, path = hub_of(request), request.path_params
    name = requested_name(path["type"], path["owner"], path["name"])

    def run(repository: Repository) -> dict[str, object]:
        with hub.database.read() as connection:
            refs = open_refs(connection, repository)
            names = [repository.name.id.lower()]
        return {**act(repository, path["sha"], refs), "names": names}

    async with hub.locked(name, identity_of(request)) as repository:
        return JSONResponse(await run_in_threadpool(run, repository))
