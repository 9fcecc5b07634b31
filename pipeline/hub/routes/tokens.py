"""API routes about tokens. `whoami-v2` tells a client the user of its token. The command `pipeline
hub tokens` calls the other routes while the hub runs. They need the hub's own token, which
`access.py` checks.
"""

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from pipeline.hub.events.payloads import owner_id
from pipeline.hub.service import hub_of
from pipeline.hub.tokens.auth import identity_of
from pipeline.hub.tokens.store import create_token, list_tokens, revoke_token

# The Hugging Face Hub answers with the URL of an image file. This URL itself contains the image, a
# grey disc, so this hub needs no such file.
_AVATAR = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 2 2'%3E"
    "%3Ccircle cx='1' cy='1' r='1' fill='%23888'/%3E%3C/svg%3E"
)


def routes() -> list[Route]:
    return [
        Route("/api/whoami-v2", whoami),
        Route("/api/settings/tokens", show, methods=["GET"]),
        Route("/api/settings/tokens/{name}", create, methods=["POST"]),
        Route("/api/settings/tokens/{name}", revoke, methods=["DELETE"]),
    ]


async def whoami(request: Request) -> Response:
    identity, hub = identity_of(request), hub_of(request)
    orgs = [
        {"type": "org", **_account(name), "roleInOrg": identity.role, "isEnterprise": False}
        for name in hub.settings.orgs
    ]
    return JSONResponse(
        {
            "type": "user",
            **_account(identity.user),
            "emailVerified": False,
            "canPay": False,
            "isPro": False,
            "periodEnd": None,
            "orgs": orgs,
            "auth": {
                "type": "access_token",
                "accessToken": {"displayName": identity.token_name, "role": identity.role},
            },
        }
    )


async def show(request: Request) -> Response:
    hub = hub_of(request)
    return JSONResponse(await run_in_threadpool(list_tokens, hub.database, hub.repositories))


async def create(request: Request) -> Response:
    """Creates a token. The query is `role=read` or `role=write`, and
    `repositories=dataset:local/facts,…`. Without `repositories`, the token is for all
    repositories. An empty `repositories` is an error, so that a script whose variable is empty gets
    no token for everything."""
    hub, query = hub_of(request), request.query_params
    reaches = query["repositories"].split(",") if "repositories" in query else []
    made = await run_in_threadpool(
        create_token,
        hub.database,
        hub.repositories,
        request.path_params["name"],
        query.get("role", "read"),
        reaches,
    )
    return JSONResponse(made, headers={"Cache-Control": "no-store"})


async def revoke(request: Request) -> Response:
    name = request.path_params["name"]
    return JSONResponse(await run_in_threadpool(revoke_token, hub_of(request).database, name))


def _account(name: str) -> dict[str, object]:
    return {"id": owner_id(name), "name": name, "fullname": name, "avatarUrl": _AVATAR}
