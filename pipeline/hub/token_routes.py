"""API routes that the command `pipeline hub tokens` calls while the hub runs. `access.py` lets only
the hub's own token use them."""

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from pipeline.hub import tokens
from pipeline.hub.service import hub_of


def routes() -> list[Route]:
    return [
        Route("/api/settings/tokens", show, methods=["GET"]),
        Route("/api/settings/tokens/{name}", create, methods=["POST"]),
        Route("/api/settings/tokens/{name}", revoke, methods=["DELETE"]),
    ]


async def show(request: Request) -> Response:
    hub = hub_of(request)
    return JSONResponse(await run_in_threadpool(tokens.listed, hub.database, hub.repositories))


async def create(request: Request) -> Response:
    """Creates a token. The query is `role=read` or `role=write`, and
    `repositories=dataset:local/facts,…`; without repositories, the token is for all."""
    hub, query = hub_of(request), request.query_params
    reaches = [each for each in query.get("repositories", "").split(",") if each]
    made = await run_in_threadpool(
        tokens.create,
        hub.database,
        hub.repositories,
        request.path_params["name"],
        query.get("role", "read"),
        reaches,
    )
    return JSONResponse(made, headers={"Cache-Control": "no-store"})


async def revoke(request: Request) -> Response:
    name = request.path_params["name"]
    return JSONResponse(await run_in_threadpool(tokens.revoke, hub_of(request).database, name))
