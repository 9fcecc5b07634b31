"""What all pages share: who looks at them, how they are written, and how errors look.

A browser holds a session: a cookie with the person's token, encrypted with the hub's key. Every
request asks the hub again whether the token is valid, so a revoked token ends its sessions. A form
has a second secret, made from the cookie, which a page of another site cannot know.
"""

import hashlib
import hmac
import time
from base64 import urlsafe_b64decode
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from mimetypes import guess_type
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import parse_qsl, quote

from fastapi import APIRouter, Depends
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.templating import Jinja2Templates

from jobs.errors import JobError
from pipeline.console.shared import Shared
from pipeline.doctor.facts import counts_text, subject
from pipeline.errors import PipelineError
from pipeline.hub.errors import Forbidden, NotFound, Unauthorized
from pipeline.hub.http_json import iso_time, read_body, reasons
from pipeline.hub.service import Hub, HubOf, Identity, check_site, grant, granted
from pipeline.paths import Home
from pipeline.settings import Settings
from receiver.errors import ReceiverError
from serving.errors import ServingError

SESSION_SECONDS = 12 * 3600
LINK_SECONDS = 60
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
}
_HERE = Path(__file__).parent
ASSETS = {file.name: file.read_bytes() for file in sorted((_HERE / "assets").iterdir())}


@dataclass(frozen=True, kw_only=True)
class Console:
    home: Home
    settings: Settings
    digest: Shared[str] = field(default_factory=partial(Shared, ""))
    """Of all that pages show; it changes with it. Empty if nobody has looked yet."""
    streams: set[Request] = field(default_factory=set)
    """The requests of `/events` that are open."""
    loops: Shared[dict[str, Any]] = field(default_factory=partial(Shared, {}))
    """What the page `/` shows, because it takes long to find out."""
    used_links: set[bytes] = field(default_factory=set)
    """What the one-time links say that were used since the start of the hub."""


@dataclass(frozen=True, kw_only=True)
class Visitor:
    identity: Identity
    csrf: str = field(repr=False)
    form: Mapping[str, str] = field(default_factory=dict)
    """The fields of the form that an `Editor` has sent; a missing field is not in it."""

    @property
    def may_edit(self) -> bool:
        return self.identity.role == "write"


async def console_of(request: Request) -> Console:
    console: Console = request.state.console
    return console


ConsoleOf = Annotated[Console, Depends(console_of)]


def viewer(request: Request, hub: HubOf) -> Visitor:
    """For pages: who looks. Raises Unauthorized without a valid session; see `Page`."""
    cookie = request.cookies.get(cookie_name(hub), "")
    token, name = opened(hub, cookie, "session", SESSION_SECONDS)
    identity = replace(hub.identify(token.encode()), user=name or hub.settings.owner)
    csrf = hmac.new(hub.secret_key, b"form " + cookie.encode(), hashlib.sha256).hexdigest()
    request.state.visitor = visitor = Visitor(identity=identity, csrf=csrf)
    return visitor


Viewer = Annotated[Visitor, Depends(viewer)]


async def form_of(request: Request) -> dict[str, str]:
    """The fields of a form. Raises Forbidden if a page of another site sends it."""
    check_site(request.scope)
    # Not `request.form()`, which reads a body of any size.
    body = (await read_body(request)).decode(errors="replace")
    # Browsers end the lines of a form with CR and LF.
    return dict(parse_qsl(body.replace("%0D%0A", "%0A"), keep_blank_values=True))


Form = Annotated[dict[str, str], Depends(form_of)]


async def editor(visitor: Viewer, form: Form) -> Visitor:
    """For changes: who changes something, and the form. Raises Forbidden."""
    visitor.identity.require_write("a change")
    if not hmac.compare_digest(form.pop("csrf", "").encode(), visitor.csrf.encode()):
        raise Forbidden("This form is of an older session: go back, reload the page, send it again")
    return Visitor(identity=visitor.identity, csrf=visitor.csrf, form=form)


Editor = Annotated[Visitor, Depends(editor)]


# Secrets that a browser holds. `grant` makes them of a kind, a token and the name of a person. A
# cookie has the kind `session`. The end of a link to `/login?once=`, which works once, has the kind
# `link`, so that nobody can use it as a session.


def cookie_name(hub: Hub) -> str:
    """Browsers send the cookies of a host to all its ports, so each hub has a name of its own."""
    return f"console_{hub.settings.port}"


def opened(hub: Hub, text: str, kind: str, seconds: int) -> tuple[str, str]:
    """The token and the name in the text. Both are empty if the text is older than `seconds`, or is
    not of this kind: the hub knows no empty token."""
    found, _, said = granted(hub.secret_key, text, seconds).partition(" ")
    token, _, name = said.partition(" ")
    return (token, name) if found == kind else ("", "")


# What a page shows


def page(request: Request, template: str, *, status: int = 200, **facts: Any) -> Response:
    """The page that the template makes of the facts. The template also gets the `console`, the time
    (`now`), and the `visitor`; None if nobody is signed in."""
    facts |= {"visitor": getattr(request.state, "visitor", None), "now": time.time()}
    facts["console"] = request.state.console
    return _templates.TemplateResponse(request, template, facts, status, HEADERS)


def go(path: str) -> Response:
    """Sends the browser to another page of the console, after a change."""
    return RedirectResponse(path, 303, HEADERS)


class Page(APIRoute):
    """A route of the console. Its errors are pages too, and without a valid session, it sends the
    browser to `/login`. Each module of pages begins with `router = APIRouter(route_class=Page)`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            try:
                return await handle(request)
            except Unauthorized:
                back = str(request.url.replace(scheme="", netloc=""))
                return go("/login?next=" + quote(back if request.method == "GET" else "/"))
            except (RequestValidationError, ValidationError) as error:
                status, said = 400, f"The request is wrong: {reasons(error)}"
            except (PipelineError, JobError, ReceiverError, ServingError) as error:
                status, said = getattr(error, "status", 409), str(error)
            return page(request, "error.html", status=status, error_text=said)

        return answer


def span(seconds: float) -> str:
    """A length of time, such as `95 s` or `3 h`."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds // size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


_templates = Jinja2Templates(_HERE / "templates")
for _filter in (counts_text, iso_time, span, subject):
    _templates.env.filters[_filter.__name__] = _filter
_templates.env.filters["path"] = quote
# A browser keeps an asset until this changes.
_templates.env.globals["version"] = hashlib.sha256(b"".join(ASSETS.values())).hexdigest()[:12]
_templates.env.policies["json.dumps_kwargs"] = {"ensure_ascii": False}


# The way in, and what needs no session

entrance = APIRouter(route_class=Page)


@entrance.get("/login")
async def show_login(
    request: Request, hub: HubOf, console: ConsoleOf, next: str = "/", once: str | None = None
) -> Response:
    """The form that asks for a token. `once` is a link of `pipeline open`, which needs none."""
    if once is None:
        return page(request, "login.html", next=next)
    token, name = opened(hub, once, "link", LINK_SECONDS)
    # The same bytes can be written as several texts.
    content = urlsafe_b64decode(once) if token else b""
    if not token or content in console.used_links:
        wrong = "This link was used already, or is older than a minute: run `pipeline open` again."
        return page(request, "login.html", status=403, next=next, wrong=wrong)
    console.used_links.add(content)
    return _signed_in(hub, token, name, next)


@entrance.post("/login")
async def login(request: Request, hub: HubOf, form: Form) -> Response:
    token, back = form.get("token", "").strip(), form.get("next", "/")
    try:
        identity = await run_in_threadpool(hub.identify, token.encode())
    except Unauthorized:
        wrong = "The hub does not know this token. `pipeline open` signs you in without one."
        return page(request, "login.html", status=401, next=back, wrong=wrong)
    identity.require_person("the console")
    name = identity.user if identity.owns_hub else identity.token_name
    return _signed_in(hub, token, name, back)


@entrance.post("/logout")
async def logout(hub: HubOf, _: Form) -> Response:
    answer = go("/login")
    answer.delete_cookie(cookie_name(hub), httponly=True, samesite="strict")
    return answer


def _signed_in(hub: Hub, token: str, name: str, back: str) -> Response:
    # A path with two slashes would be the address of another site.
    answer = go(back if back.startswith("/") and not back.startswith("//") else "/")
    text = grant(hub.secret_key, "session", token, name)
    secure = hub.settings.url.startswith("https:")
    answer.set_cookie(
        cookie_name(hub), text, SESSION_SECONDS, secure=secure, httponly=True, samesite="strict"
    )
    return answer


@entrance.get("/assets/{name}")
async def send_asset(name: str) -> Response:
    if name not in ASSETS:
        raise NotFound(f"The console has no asset {name}.")
    headers = {**HEADERS, "Cache-Control": "public, max-age=31536000, immutable"}
    return Response(ASSETS[name], media_type=guess_type(name)[0], headers=headers)
