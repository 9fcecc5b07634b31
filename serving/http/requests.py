"""What the services check of a request: that its body does not take too much memory, and that no
page of another site has caused it. Large JSON bodies are read in a thread.

A page of another site can make the user's browser send requests to a server that only the user's
machine can reach, and the browser adds the user's login. There are two cases:

- The page sends requests to the address of this server. The browser says in `Origin` or
  `Sec-Fetch-Site` that the page belongs to another site. `other_site` recognises such requests.
- The owner of the page makes the page's own host name resolve to 127.0.0.1 (DNS rebinding). The
  browser then takes this server for the page's server, but it sends the page's host name as `Host`.
  `other_host` recognises such requests.
"""

import asyncio
import ipaddress
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

FREE_BYTES = 64 * 1024
"""The first bytes of each body do not count towards the limit. So a small request is accepted even
while a few clients use up the limit with large bodies that they never finish."""

LARGE_JSON_BYTES = 64 * 1024
"""A larger body is parsed and validated in a thread. A smaller one takes the event loop only a few
milliseconds."""

MAX_COMMAS = 2**19
"""While a body is parsed, even in a thread, no other thread can run, so every stream pauses: 50 ms
for so many values, and half a second for as many as fit into 8 MiB."""

_NUM_LARGE = 8
"""How many bodies of the largest size may be in memory at once."""


class BodiesInFlight:
    """Counts the bytes of all bodies in memory, except the first `FREE_BYTES` of each. The limit is
    `_NUM_LARGE` times `max_body_bytes`, which is the largest size of one body."""

    def __init__(self, max_body_bytes: int) -> None:
        self._max_bytes = _NUM_LARGE * max_body_bytes
        self._num_bytes = 0

    @contextmanager
    def body(self) -> Iterator[Callable[[int], None]]:
        """Yields a function that counts one body. Keep the `with` block open until the request is
        answered.

        Call the function with the size of each piece of the body that arrives. It raises
        `HTTPException` 503 if all bodies together exceed the limit.
        """
        num_counted = -FREE_BYTES

        def count(num_bytes: int) -> None:
            nonlocal num_counted
            before = max(num_counted, 0)
            num_counted += num_bytes
            self._num_bytes += max(num_counted, 0) - before
            if num_counted > 0 and self._num_bytes > self._max_bytes:
                raise HTTPException(
                    503,
                    "The server is receiving too many large requests at once; send this request "
                    "again later.",
                    headers={"Retry-After": "1"},
                )

        try:
            yield count
        finally:
            self._num_bytes -= max(num_counted, 0)


class LimitedBodies:
    """Middleware that applies the limit of `BodiesInFlight` to all requests of `app`, and answers
    413 to a body of more than `max_body_bytes`. Use it for an application that keeps each request
    body in memory."""

    def __init__(self, app: ASGIApp, *, max_body_bytes: int) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._bodies = BodiesInFlight(max_body_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        with self._bodies.body() as count:
            num_bytes = 0

            async def counted() -> Message:
                nonlocal num_bytes
                message = await receive()
                num_bytes += len(message.get("body", b""))
                if num_bytes > self._max_body_bytes:
                    raise HTTPException(
                        413, f"The body is larger than {self._max_body_bytes} bytes."
                    )
                count(len(message.get("body", b"")))
                return message

            await self._app(scope, counted, send)


class JsonRequest(Request):
    """A request whose JSON body is already parsed and validated."""

    body_value: Any = None

    async def json(self) -> Any:
        # FastAPI validates this value again, which does nothing to an instance of its class.
        return self.body_value


def json_routes(check: Callable[[Request], Awaitable[None]]) -> type[APIRoute]:
    """A class of routes that first call `check`, and then read the body as JSON.

    `check` should raise an error if the client may not send this request. It runs first, so that
    such a client cannot make the server parse a body. Raises RequestValidationError if the body
    does not fit the schema of the route.
    """

    class JsonRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()
            validate = None if self.body_field is None else self.body_field.validate

            async def handle_json(request: Request) -> Response:
                await check(request)
                if request.method == "POST":
                    _check_content_type(request)
                read = JsonRequest(request.scope, request.receive)
                if validate is not None and (body := await read.body()):
                    if len(body) > LARGE_JSON_BYTES:
                        read.body_value = await asyncio.to_thread(_read_json, body, validate)
                    else:
                        read.body_value = _read_json(body, validate)
                return await handle(read)

            return handle_json

    return JsonRoute


def _read_json(body: bytes, validate: Callable[..., tuple[Any, list[dict[str, Any]]]]) -> Any:
    """The value that `validate` makes of a body. Raises HTTPException 400 if the body is not JSON
    or has more than `MAX_COMMAS`, and RequestValidationError if `validate` finds errors."""
    if body.count(b",") > MAX_COMMAS:
        raise HTTPException(400, f"The body has more than {MAX_COMMAS} commas; send a shorter one.")
    try:
        content = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise HTTPException(400, f"The body is not JSON: {error}") from None
    value, errors = validate(content, loc=("body",))
    if errors:
        raise RequestValidationError(errors)
    return value


def _check_content_type(request: Request) -> None:
    """Raise HTTPException 400 if the content type is not JSON.

    For a page of another site, a browser sends JSON only after a CORS preflight request, which this
    server can refuse. It sends some other types, or no type, without a preflight. So if this server
    accepted these, every page that its user opens could send requests to it.
    """
    given = request.headers.get("content-type", "")
    if given.partition(";")[0].strip().lower() != "application/json":
        raise HTTPException(400, f"Content-Type must be application/json, not {given!r}.")


def other_site(headers: Mapping[str, str]) -> str | None:
    """If a page of another site made a browser send this request: the name of this site, as a text
    for an error message.

    None if the request comes from a page of this server, or from a client that is not a browser.
    The names in `headers` must be in lower case.
    """
    origin = headers.get("origin")
    if origin is not None and origin.partition("://")[2].lower() != headers.get("host", "").lower():
        return origin
    # Browsers do not send `Origin` with every request, so look at `Sec-Fetch-Site` too. Its value
    # `none` means that no page caused the request: the user typed the URL, for example.
    relation = headers.get("sec-fetch-site", "none")
    return None if relation in ("same-origin", "none") else f"a {relation} page"


def other_host(
    headers: Mapping[str, str], server: tuple[str, int | None] | None, names: Collection[str]
) -> str | None:
    """The `Host` header of a request over loopback, if this host is not loopback and is not one of
    `names`. None for any other request, and for one without `Host`: browsers always send it.

    `server` is the local address of the connection (host and port), as in an ASGI scope. `names`
    are the other host names of this server, in lower case.
    """
    if server is None or not _is_loopback(server[0]):
        return None
    host, name = headers.get("host", ""), named_host(headers)
    is_known = is_loopback_name(name) or (name != "" and name in names)
    return None if host == "" or is_known else host


def named_host(headers: Mapping[str, str]) -> str:
    """The host name in the header `Host`, in lower case. Empty if there is none."""
    return host_name(f"//{headers.get('host', '')}").removesuffix(".")


def is_loopback_name(name: str) -> bool:
    """Whether a browser takes `name`, in lower case, for a name of its own machine."""
    # Browsers resolve `localhost` and names that end in `.localhost` to loopback (RFC 6761, 6.3).
    return name == "localhost" or name.endswith(".localhost") or _is_loopback(name)


def host_name(url: str) -> str:
    """The host name in the URL, in lower case. Empty if the URL has no host name."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
