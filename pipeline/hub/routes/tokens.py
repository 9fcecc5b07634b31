"""API routes about tokens. `whoami-v2` tells a client the user of its token. The command `pipeline
hub tokens` calls the other routes while the hub runs."""

from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.responses import JSONResponse

from pipeline.hub.events import owner_id
from pipeline.hub.http_json import Json
from pipeline.hub.routes.access import hubs_own, with_token
from pipeline.hub.service import HubOf
from pipeline.hub.tokens import Identity, create_token, list_tokens, revoke_token

account = APIRouter()
router = APIRouter(prefix="/api/settings/tokens", dependencies=[Depends(hubs_own)])


@account.get("/api/whoami-v2")
async def whoami(hub: HubOf, identity: Annotated[Identity, Depends(with_token)]) -> Json:
    return {
        "type": "user",
        **_account(identity.user),
        "orgs": [
            {"type": "org", **_account(name), "roleInOrg": identity.role}
            for name in hub.settings.orgs
        ],
        "auth": {
            "type": "access_token",
            "accessToken": {"displayName": identity.token_name, "role": identity.role},
        },
    }


@router.get("")
def show(hub: HubOf) -> JSONResponse:
    return JSONResponse(list_tokens(hub.database, hub.repositories))


@router.post("/{name:part}")
def create(
    hub: HubOf, name: str, role: str = "read", repositories: str | None = None
) -> JSONResponse:
    """Creates a token for `repositories`, such as `dataset:local/facts,…`. Without them, it is for
    all repositories. An empty `repositories` is an error, so that a script whose variable is empty
    gets no token for everything."""
    reaches = [] if repositories is None else repositories.split(",")
    made = create_token(hub.database, hub.repositories, name, role, reaches)
    return JSONResponse(made, headers={"Cache-Control": "no-store"})


@router.delete("/{name:part}")
def revoke(hub: HubOf, name: str) -> JSONResponse:
    return JSONResponse(revoke_token(hub.database, name))


def _account(name: str) -> Json:
    return {"id": owner_id(name), "name": name, "fullname": name, "avatarUrl": ""}
