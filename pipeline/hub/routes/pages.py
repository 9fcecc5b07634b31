"""HTML pages for a person: the list of webhooks, and for each webhook its deliveries, with a button
that sends a delivery again.

To log in, a person sends a token in a form. The browser then has a cookie with this token, which
only the hub can decrypt. The cookie counts for these pages only, and never for the API or for git:
a browser sends it to each port of a host, so other programs of this machine may get it. Each form
that changes something has a second token, which no page of another site knows.
"""

import json
import secrets
from pathlib import Path
from typing import Annotated
from urllib.parse import parse_qs

from fastapi import APIRouter, Depends
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.templating import Jinja2Templates

from pipeline.hub.errors import Forbidden, RequestError, Unauthorized
from pipeline.hub.http_json import iso_time, read_body
from pipeline.hub.outbox import list_deliveries
from pipeline.hub.routes import activity
from pipeline.hub.routes.access import everywhere, person
from pipeline.hub.service import HubOf
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


_form_token = secrets.token_urlsafe(32)


class LoginNeeded(RequestError):
    """A browser has no valid login; it gets the form."""

    status = 401


async def _logged_in(request: Request, hub: HubOf) -> Identity:
    """Who has sent the request: its own token counts, or else the token of its cookie. Raises
    LoginNeeded, and Forbidden for a page of another site."""
    check_site(request.scope)
    if "authorization" in request.headers:
        return await hub.guard.check(request.scope)
    match hub.cipher.read_grant(request.cookies.get(COOKIE, ""), seconds=SESSION_SECONDS):
        case ["login", token]:
            return await _identity(request, hub, token, if_refused="")
        case _:
            raise LoginNeeded("")


async def _identity(request: Request, hub: HubOf, token: str, *, if_refused: str) -> Identity:
    """Who has this token. Raises LoginNeeded with the text `if_refused` if nobody has it."""
    headers = [(b"authorization", f"Bearer {token}".encode())]
    try:
        return await hub.guard.check({**request.scope, "headers": headers})
    except Unauthorized:
        raise LoginNeeded(if_refused) from None


async def _reader(request: Request, identity: Annotated[Identity, Depends(_logged_in)]) -> Identity:
    return await person(request, await everywhere(request, identity))


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
    token = (await _form(request)).get("token", "").strip()
    await _identity(request, hub, token, if_refused="The hub does not accept this token.")
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
            "form_token": _form_token,
        }
    return _templates.TemplateResponse(request, "webhooks.html", facts, headers=HEADERS)


@pages.post("/{id}/replay")
async def replay(request: Request, hub: HubOf, id: str) -> Response:
    form = await _form(request)
    if not secrets.compare_digest(form.get("token", "").encode(), _form_token.encode()):
        raise Forbidden(
            "This form does not come from a page of this hub, or the hub has restarted after the "
            "page was loaded: load the page again."
        )
    force = "force" in form
    await run_in_threadpool(activity.replay, hub, form.get("delivery", ""), force)
    return RedirectResponse(f"{PAGES}/{id}", status_code=303)


async def _form(request: Request) -> dict[str, str]:
    fields = parse_qs((await read_body(request)).decode("latin-1"))
    return {name: values[0] for name, values in fields.items()}


def _indented(payload: str) -> str:
    return json.dumps(json.loads(payload), indent=2, ensure_ascii=False)


_templates = Jinja2Templates(Path(__file__).parent)
_templates.env.filters |= {"utc": iso_time, "indented": _indented}
