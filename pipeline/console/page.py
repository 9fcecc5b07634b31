"""What all pages share: who looks at them, how they are written, and how errors look.

A browser holds a session: a cookie with the person's token, encrypted with the hub's key. Every
request asks the hub again whether the token is valid, so a revoked token ends its sessions. A form
has a second secret, made from the cookie, which a page of another site cannot know.
"""

import hashlib
import hmac
import json
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import parse_qsl, quote, urlencode

from cryptography.fernet import Fernet, InvalidToken
from fastapi import Depends
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.templating import Jinja2Templates

from jobs.errors import JobError, JobNotFound
from pipeline.console.watch import Shared, Watch
from pipeline.errors import PipelineError
from pipeline.hub.errors import Forbidden, RequestError, Unauthorized
from pipeline.hub.http_json import iso_time, read_body, reasons
from pipeline.hub.service import Hub, HubOf, Identity, check_site
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
_ASSETS_DIGEST = hashlib.sha256(b"".join(ASSETS.values())).hexdigest()[:12]


@dataclass(frozen=True, kw_only=True)
class Console:
    home: Home
    settings: Settings
    watch: Watch = field(default_factory=Watch)
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


class _SignInNeeded(Exception):
    pass


async def console_of(request: Request) -> Console:
    console: Console = request.state.console
    return console


ConsoleOf = Annotated[Console, Depends(console_of)]


def viewer(request: Request, hub: HubOf) -> Visitor:
    """For pages: who looks. Without a valid session, the browser is sent to `/login`."""
    cookie = request.cookies.get(cookie_name(hub), "")
    token = opened(hub, cookie, "session", SESSION_SECONDS)
    try:
        if token is None:
            raise _SignInNeeded
        identity = hub.identify(token.encode())
    except Unauthorized:
        raise _SignInNeeded from None
    csrf = hmac.new(hub.secret_key, b"form " + cookie.encode(), hashlib.sha256).hexdigest()
    visitor = Visitor(identity=identity, csrf=csrf)
    request.state.visitor = visitor
    return visitor


Viewer = Annotated[Visitor, Depends(viewer)]


async def form_of(request: Request) -> dict[str, str]:
    """The fields of a form. Raises Forbidden if a page of another site sends it."""
    check_site(request.scope)
    # Not `request.form()`, because this needs another package.
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


# Secrets that a browser holds. The kind keeps a link from being used as a session.


def cookie_name(hub: Hub) -> str:
    """Browsers send the cookies of a host to all its ports, so each hub has a name of its own."""
    return f"console_{hub.settings.port}"


def link_to(hub_url: str, *, key: bytes, token: str) -> str:
    """A link that signs in with the token, once, within LINK_SECONDS."""
    return f"{hub_url}/login?once={sealed(key, 'link', token)}"


def sealed(key: bytes, kind: str, token: str) -> str:
    return Fernet(key).encrypt(json.dumps([kind, token]).encode()).decode()


def opened(hub: Hub, text: str, kind: str, seconds: int) -> str | None:
    """The token in the text; None if the text is older than `seconds`, or is not of this kind."""
    try:
        found = json.loads(Fernet(hub.secret_key).decrypt(text.encode(), ttl=seconds))
    except (InvalidToken, ValueError):
        return None
    if isinstance(found, list) and found[:1] == [kind]:
        return str(found[1])
    return None


# What a page shows


def page(request: Request, template: str, *, status: int = 200, **facts: Any) -> Response:
    """The page that the template makes of the facts. The template also gets `visitor` (None if
    nobody is signed in) and `seen`, the state of the stack that the page shows at least."""
    state = request.state
    facts |= {"visitor": getattr(state, "visitor", None), "seen": state.console.watch.digest.value}
    return _templates.TemplateResponse(
        request, template, facts, status_code=status, headers=HEADERS
    )


def go(path: str) -> Response:
    """Sends the browser to another page of the console, after a change."""
    return RedirectResponse(path, 303, HEADERS)


class Page(APIRoute):
    """A route of the console. Its errors are pages too. Each module of pages begins with
    `router = APIRouter(route_class=Page)`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            try:
                return await handle(request)
            except _SignInNeeded:
                path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
                back = path if request.method == "GET" else "/"
                return go(f"/login?{urlencode({'next': back})}")
            except RequestError as error:
                status, text = error.status, str(error)
            except (RequestValidationError, ValidationError) as error:
                status, text = 400, f"The request is wrong: {reasons(error)}"
            except JobNotFound as error:
                status, text = 404, str(error)
            except (PipelineError, JobError, ReceiverError, ServingError) as error:
                status, text = 409, str(error)
            return await run_in_threadpool(
                page, request, "error.html", status=status, error_text=text
            )

        return answer


def asset(name: str) -> str:
    """The URL of an asset, which changes with the assets: a browser may keep what it has got."""
    return f"/assets/{name}?v={_ASSETS_DIGEST}"


def span(seconds: float) -> str:
    """A length of time with one or two units, such as `4 s`, `2 min 5 s` or `3 d 4 h`."""
    for size, unit, below, smaller in (
        (86400, "d", 3600, "h"),
        (3600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        if seconds >= size:
            rest = int(seconds % size // below)
            return f"{int(seconds // size)} {unit}" + (f" {rest} {smaller}" if rest else "")
    return f"{max(0, int(seconds))} s"


def utc(moment: float) -> str:
    """moment: in seconds since the epoch."""
    return f"{iso_time(moment)[:19].replace('T', ' ')} UTC"


def ago(moment: float) -> str:
    """moment: in seconds since the epoch."""
    return f"{span(time.time() - moment)} ago"


_templates = Jinja2Templates(_HERE / "templates")
_templates.env.filters |= {"utc": utc, "span": span, "ago": ago, "path": quote}
_templates.env.globals |= {"asset": asset}
_templates.env.policies["json.dumps_kwargs"] = {"ensure_ascii": False}
