"""API route `whoami-v2`, which tells a client the user of its token."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from pipeline.hub.auth import identity_of
from pipeline.hub.payloads import owner_id
from pipeline.hub.service import hub_of

# The Hugging Face Hub answers the URL of an image. This URL contains the image, a grey disc, so the
# hub needs no file for it.
_AVATAR = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 2 2'%3E"
    "%3Ccircle cx='1' cy='1' r='1' fill='%23888'/%3E%3C/svg%3E"
)


def routes() -> list[Route]:
    return [Route("/api/whoami-v2", whoami)]


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


def _account(name: str) -> dict[str, object]:
    return {"id": owner_id(name), "name": name, "fullname": name, "avatarUrl": _AVATAR}
