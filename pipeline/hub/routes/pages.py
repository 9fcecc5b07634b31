"""HTML pages for a person: the list of webhooks, and for each webhook its deliveries.

To log in, a person sends a token in a form. The browser then has a cookie with this token, which
only the hub can decrypt. The cookie counts for these pages only, and never for the API or for git:
a browser sends it to each port of a host, so other programs of this machine may get it. The pages
change nothing, so no page of another site can misuse the cookie.
"""

import json
from pathlib import Path
from urllib.parse import parse_qs

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.templating import Jinja2Templates

from pipeline.hub.errors import RequestError, Unauthorized
from pipeline.hub.http_json import iso_time, read_body
from pipeline.hub.outbox import list_deliveries
from pipeline.hub.service import Hub, HubOf, everywhere, identified, identify, person
from pipeline.hub.tokens import Identity, check_site
from pipeline.hub.webhooks import get_webhook, list_webhooks

PAGES = "/settings/webhooks"
LOGIN = "/settings/login"
COOKIE = "hub_session"
SESSION_SECONDS = 12 * 3600
NUM_SHOWN = 50

HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; form-action 'self'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "same-origin",
}


class LoginNeeded(RequestError):
    """A browser has no valid login; it gets the form."""

    status = 401


async def _reader(request: Request, hub: HubOf) -> None:
    """Checks the request's own token, or else the token of its cookie. Raises LoginNeeded, and
    Forbidden for a token that may not list webhooks."""
    if "authorization" in request.headers:
        identity = await identified(request, hub)
    else:
        match hub.cipher.read_grant(request.cookies.get(COOKIE, ""), seconds=SESSION_SECONDS):
            case ["login", token]:
                identity = await _identity(hub, token, if_refused="")
            case _:
                raise LoginNeeded("")
    await person(request, await everywhere(request, identity))


async def _identity(hub: Hub, token: str, *, if_refused: str) -> Identity:
    """Who has this token. Raises LoginNeeded with the text `if_refused` if nobody has it."""
    try:
        return await identify(hub, token.encode())
    except Unauthorized:
        raise LoginNeeded(if_refused) from None


pages = APIRouter(prefix=PAGES, dependencies=[Depends(_reader)])
login = APIRouter(prefix=LOGIN)


async def on_login_needed(request: Request, error: Exception) -> Response:
    # If the scheme were Basic, the browser would ask for a login itself. It would then send it with
    # every request to the hub, even if a page of another site causes the request.
    headers = {**HEADERS, "WWW-Authenticate": "Bearer"}
    message = {"message": error}
    return _templates.TemplateResponse(request, "login.html", message, 401, headers)


@login.post("")
async def log_in(request: Request, hub: HubOf) -> Response:
    """Gives the browser the cookie, and leads it to the list of webhooks. Raises Forbidden if a
    page of another site has sent the form."""
    check_site(request.scope)
    form = parse_qs((await read_body(request)).decode("latin-1"))
    token = form.get("token", [""])[0].strip()
    await _identity(hub, token, if_refused="The hub does not accept this token.")
    answer = RedirectResponse(PAGES, status_code=303)
    cookie = hub.cipher.grant("login", token)
    answer.set_cookie(COOKIE, cookie, path=PAGES, httponly=True, samesite="strict")
    return answer


@pages.get("")
def show_all(request: Request, hub: HubOf) -> Response:
    with hub.database.read() as connection:
        facts = {"webhooks": list_webhooks(connection)}
    return _templates.TemplateResponse(request, "webhooks.html", facts, headers=HEADERS)


@pages.get("/{id}")
def show(request: Request, hub: HubOf, id: str) -> Response:
    with hub.database.read() as connection:
        facts = {
            "webhook": get_webhook(connection, id),
            "deliveries": list_deliveries(connection, id, limit=NUM_SHOWN),
        }
    return _templates.TemplateResponse(request, "webhooks.html", facts, headers=HEADERS)


def _indented(payload: str) -> str:
    return json.dumps(json.loads(payload), indent=2, ensure_ascii=False)


_templates = Jinja2Templates(Path(__file__).parent)
_templates.env.filters |= {"utc": iso_time, "indented": _indented}
