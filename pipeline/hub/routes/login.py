"""The login of a browser, for the HTML pages (`pages.py`).

A person sends a token in a form. The browser then has a cookie with this token, which only the hub
can decrypt. The cookie counts for the pages only, and never for the API or for git. A browser sends
it to each port of a host, so other programs of this machine may get it.
"""

import re
from functools import cache
from importlib.resources import files
from urllib.parse import parse_qs

from cryptography.fernet import Fernet, InvalidToken
from jinja2 import Environment, Template
from starlette.requests import HTTPConnection, Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import Scope

from pipeline.hub.errors import Unauthorized
from pipeline.hub.git.backend import header
from pipeline.hub.http_json import read_body
from pipeline.hub.routes.pages import HEADERS, PAGES
from pipeline.hub.tokens import auth

LOGIN = "/settings/login"
COOKIE = "hub_session"
SESSION_SECONDS = 12 * 3600

_PAGE = re.compile(rf"{PAGES}(/[^/]+(/replay)?)?")


class BrowserLogin:
    """Makes the cookies, and reads them. `secret_key` is a Fernet key."""

    def __init__(self, secret_key: bytes) -> None:
        self._fernet = Fernet(secret_key)

    def route(self) -> Route:
        return Route(LOGIN, self._log_in, methods=["POST"])

    def with_token(self, scope: Scope) -> Scope:
        """The request with the token of its cookie as bearer token. A request that has a token
        itself, and one for something other than a page, stays as it is."""
        if not _PAGE.fullmatch(scope["path"]) or header(scope, b"authorization"):
            return scope
        cookie = HTTPConnection(scope).cookies.get(COOKIE, "")
        try:
            return _with_bearer(scope, self._fernet.decrypt(cookie.encode(), ttl=SESSION_SECONDS))
        except InvalidToken:
            return scope

    async def _log_in(self, request: Request) -> Response:
        """Gives the browser the cookie, and leads it to the list of webhooks. Raises Forbidden if a
        page of another site has sent the form."""
        auth.check_site(request.scope)
        fields = parse_qs((await read_body(request)).decode("latin-1"))
        token = fields.get("token", [""])[0].strip().encode()
        try:
            await request.app.state.guard.check(_with_bearer(request.scope, token))
        except Unauthorized:
            return _form("The hub does not accept this token.")
        answer = RedirectResponse(PAGES, status_code=303)
        cookie = self._fernet.encrypt(token).decode()
        answer.set_cookie(COOKIE, cookie, path=PAGES, httponly=True, samesite="strict")
        return answer


def is_login(scope: Scope) -> bool:
    """Whether the request sends the form. It needs no other token than the one in the form."""
    return bool(scope["path"] == LOGIN and scope["method"] == "POST")


def form_instead(scope: Scope, error: Exception) -> Response | None:
    """The form, if `error` says that the request for a page has no valid login. None for any other
    error and for a client that sent a token itself."""
    is_page = scope["path"] == LOGIN or _PAGE.fullmatch(scope["path"])
    is_browser = is_page and not header(scope, b"authorization")
    return _form("") if is_browser and isinstance(error, Unauthorized) else None


def _with_bearer(scope: Scope, token: bytes) -> Scope:
    others = [each for each in scope["headers"] if each[0] != b"authorization"]
    headers = [*others, (b"authorization", b"Bearer " + token)]
    return {**scope, "state": {**scope.get("state", {})}, "headers": headers}


def _form(message: str) -> Response:
    # If the scheme were Basic, the browser would ask for a login itself. It would then send it with
    # every request to the hub, even if a page of another site causes the request.
    headers = {**HEADERS, "WWW-Authenticate": "Bearer"}
    return HTMLResponse(_template().render(message=message), status_code=401, headers=headers)


@cache
def _template() -> Template:
    source = files("pipeline.hub.routes").joinpath("login.html").read_text(encoding="utf-8")
    return Environment(autoescape=True).from_string(source)
