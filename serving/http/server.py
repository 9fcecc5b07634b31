"""The HTTP server of each service, and what every service checks of a request.

uvicorn itself waits for ever for the rest of a request, and for a client to read its answer.
`Server` ends the connection of a client that makes no progress for too long, or that sends too many
requests or too large headers. `BodiesInFlight` limits the memory that bodies take.

A page of another site can make the user's browser send requests to a server that only the user's
machine can reach, and the browser adds the user's login. There are two cases:

- The page sends requests to the address of this server. The browser says in `Origin` or
  `Sec-Fetch-Site` that the page belongs to another site. `other_site` recognises such requests.
- The owner of the page makes the page's own host name resolve to 127.0.0.1 (DNS rebinding). The
  browser then takes this server for the page's server, but it sends the page's host name as `Host`.
  `other_host` recognises such requests.
"""

import asyncio
import contextlib
import gc
import ipaddress
import socket
import struct
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

import uvicorn
from pydantic_core import from_json
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

MIN_BYTES = 4096
"""A client that sends a body or reads an answer makes progress if it sends or reads this many bytes
within its time limit. If one byte were enough, a client could hold a connection for ever."""

MAX_HEADER_BYTES = 64 * 1024

_TICKS_PER_CHECK = 2
"""uvicorn calls `on_tick` ten times a second, so clients are checked five times a second."""

MAX_PIPELINED = 8
"""A client may send this many further requests while the server works on its first one, because
their bodies are kept. If it sends more, its connection is ended."""

_RESET = struct.pack("ii", 1, 0)

_TCP_INFO: int | None = getattr(socket, "TCP_INFO", None) if sys.platform == "linux" else None
_ACKNOWLEDGED = slice(120, 128)
"""The place of `tcpi_bytes_acked` in `struct tcp_info` (linux/tcp.h). The size of the write buffer
cannot replace this field: with uvloop, it does not change until a complete write is done."""

FREE_BYTES = 64 * 1024
"""The first bytes of each body do not count towards the limit. So a small request is accepted even
while a few clients use up the limit with large bodies that they never finish."""

MAX_COMMAS = 2**18
"""While a body is parsed and checked, every stream pauses: about 50 ms for so many values, and a
second for as many as fit into 8 MiB."""

_NUM_LARGE = 8
"""How many bodies of the largest size may be in memory at once."""

Awaited = Literal["idle", "headers", "body", "reading"]
"""What the client must do next: begin another request after an answer, send the headers of a
request, send the rest of a body, or read an answer. `Limits` has a time limit for each."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How many clients may be connected, and how long each may make no progress."""

    max_connections: int = 512
    """How many connections may be open at once. If one more client connects, the server looks at
    the clients for which it waits, and ends the connection that has made no progress for the
    longest time. If it waits for no client, it ends the new connection."""
    idle_seconds: float = 75
    """A connection stays open for this time between an answer and the next request. Clients and
    load balancers reuse connections. If the server closed a connection at the moment when a client
    sends a request on it, the request would fail, so this time is longer than those after which
    most of them close unused connections themselves (httpx 5 s, AWS's load balancer 60 s)."""
    headers_seconds: float = 15
    """A client must send the complete headers of a request within this time. The time starts when
    the client connects, and when it begins another request."""
    body_seconds: float = 30
    """A client that sends a body must make progress within this time."""
    reading_seconds: float = 60
    """A client that has an answer to read must make progress within this time."""


class Connection(HttpToolsProtocol):
    """uvicorn's connection, with limits. The server calls `check_progress` from time to time."""

    limits: Limits
    connections: "set[Any]"

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.progress_at = self.loop.time()
        """When the client last made progress."""
        self._checked: tuple[Awaited | None, object] = ("headers", None)
        """What the last check found: what the client had to do, and for which request."""
        self._num_moved = 0
        """The result of `_moved` when the client last made progress."""
        self._num_received = 0
        self._num_header_bytes = 0
        self._running: RequestResponseCycle | None = None
        """The request that the application answers. (`cycle` is the newest one.)"""
        if len(self.connections) > self.limits.max_connections:
            others = [one for one in self.connections if one is not self]
            waiting_for = [one for one in others if one.check_progress() is not None]
            min(waiting_for, key=lambda one: one.progress_at, default=self).end()

    def data_received(self, data: bytes) -> None:
        self._num_received += len(data)
        super().data_received(data)
        # If several requests arrive together, httptools parses all of them before uvicorn answers
        # the first one. So count them here.
        if len(self.pipeline) > MAX_PIPELINED:
            self.end()
            return
        # httptools accepts headers of any size, so count their bytes here. uvicorn makes a new
        # scope when a request begins, and a new cycle for this scope when the headers are complete.
        # So if the cycle has the newest scope, the client has sent its headers completely.
        if self.cycle is not None and self.cycle.scope is self.scope:
            self._num_header_bytes = 0
            return
        self._num_header_bytes += len(data)
        if self._num_header_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The headers are larger than {MAX_HEADER_BYTES} bytes.")

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if self.pipeline:
            # uvicorn has paused reading. Then nobody would see that the client disconnects.
            self.flow.resume_reading()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    def resume_writing(self) -> None:
        super().resume_writing()
        # The client has read most of what was buffered for it. That is progress, so make the next
        # check start the time limit again.
        self._checked = (None, None)

    def check_progress(self) -> Awaited | None:
        """What the client must do next; None if the server waits for the application and not for
        the client. Ends the connection if the client has exceeded its time limit."""
        awaited, now = self._awaited(), self.loop.time()
        found = (awaited, self.cycle)
        num_moved = self._moved(awaited)
        if found != self._checked or num_moved - self._num_moved >= MIN_BYTES:
            self._checked, self.progress_at, self._num_moved = found, now, num_moved
        elif awaited and now - self.progress_at > getattr(self.limits, f"{awaited}_seconds"):
            self.end()
        return awaited

    def end(self) -> None:
        """End the connection at once. Bytes that the client has not read are dropped."""
        if self.transport.get_write_buffer_size():
            connection: socket.socket = self.transport.get_extra_info("socket")
            # Make the operating system reset the connection. Otherwise it would keep the unread
            # bytes and go on trying to send them.
            with contextlib.suppress(OSError):  # raised if the client has already disconnected
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self.transport.abort()
        else:
            self.transport.close()
        self.connections.discard(self)

    def _awaited(self) -> Awaited | None:
        cycle = self.cycle
        is_answered = cycle is None or cycle.response_complete
        if self.flow.write_paused:
            return "reading"
        if is_answered:
            if self.transport.get_write_buffer_size():
                return "reading"
            return "headers" if cycle is None or self._num_header_bytes else "idle"
        # If uvicorn has paused reading, the application has not yet taken the part of the body that
        # has arrived. The client then waits for the application.
        is_sending = cycle.more_body and not cycle.waiting_for_100_continue
        return "body" if is_sending and not self.flow.read_paused else None

    def _moved(self, awaited: Awaited | None) -> int:
        """A number that grows by one with each byte that the client sends, or that its operating
        system receives. It may start at any value, so compare it only with an earlier result for
        the same `awaited`."""
        if awaited != "reading":
            return self._num_received if awaited == "body" else 0
        if _TCP_INFO is not None:
            connection: socket.socket = self.transport.get_extra_info("socket")
            info = connection.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _ACKNOWLEDGED.stop)
            return int.from_bytes(info[_ACKNOWLEDGED], sys.byteorder)
        # The application writes nothing while a client must read, so the write buffer only shrinks.
        return -self.transport.get_write_buffer_size()


class Server(uvicorn.Server):
    """uvicorn's server, which also checks from time to time whether its clients make progress. It
    uses the logging of this process and does not log each request."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        shutdown_seconds: int,
        limits: Limits | None = None,
        lifespan: Literal["auto", "on", "off"] = "auto",
    ) -> None:
        """When the server stops, requests that are still running get `shutdown_seconds` to end. A
        request that has not ended by then is answered with 503. If its answer has begun, its
        connection is closed."""

        class Limited(Connection):
            pass

        Limited.limits = limits or Limits()
        config = uvicorn.Config(
            _answer_at_stop(app, lambda: self.should_exit),
            http=Limited,
            ws="none",  # so that `connections` has only connections of HTTP
            log_config=None,
            log_level="warning",
            access_log=False,
            timeout_keep_alive=int(Limited.limits.idle_seconds) + 1,
            lifespan=lifespan,
            timeout_graceful_shutdown=shutdown_seconds,
        )
        super().__init__(config)

    async def on_tick(self, counter: int) -> bool:
        if counter % _TICKS_PER_CHECK == 0:
            connections: list[Any] = list(self.server_state.connections)
            for connection in connections:
                connection.check_progress()
        return await super().on_tick(counter)


def _answer_at_stop(app: ASGIApp, is_stopping: Callable[[], bool]) -> ASGIApp:
    """uvicorn cancels the requests that outlast its stop, and would answer them with 500. An answer
    without end can ask `is_stopping` of its scope, and end by itself."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        scope["is_stopping"] = is_stopping
        try:
            await app(scope, receive, send)
        except asyncio.CancelledError:
            if scope["type"] != "http":
                raise
            stopped = PlainTextResponse(
                "The server stopped before it could answer. Send the request again.\n",
                status_code=503,
                headers={"Retry-After": "1"},
            )
            # The answer has begun, or the client does not read it.
            with contextlib.suppress(RuntimeError, asyncio.CancelledError):
                await stopped(scope, receive, send)

    return answer


def freeze_imports() -> None:
    """Exclude all objects that exist now, mainly imported modules, from garbage collection. They
    live as long as the process. Otherwise each full collection would take about 0.1 s, and during
    this time no request would be answered, and no stream would get a token."""
    gc.collect()
    gc.freeze()


class BodiesInFlight:
    """Counts the bytes of all bodies in memory, except the first `FREE_BYTES` of each. The limit is
    `_NUM_LARGE` times `max_body_bytes`, which is the largest size of one body."""

    def __init__(self, max_body_bytes: int) -> None:
        self._max_bytes = _NUM_LARGE * max_body_bytes
        self._num_bytes = 0

    @contextlib.contextmanager
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
        most, num_bytes = self._max_body_bytes, 0
        with self._bodies.body() as count:

            async def counted() -> Message:
                nonlocal num_bytes
                message = await receive()
                num_bytes += len(message.get("body", b""))
                if num_bytes > most:
                    raise HTTPException(413, f"The body is larger than {most} bytes.")
                count(len(message.get("body", b"")))
                return message

            await self._app(scope, counted, send)


class JsonRequest(Request):
    async def json(self) -> Any:
        """Raises HTTPException 400 if the body is not JSON or has more than `MAX_COMMAS`."""
        body = await self.body()
        if body.count(b",") > MAX_COMMAS:
            message = f"The body has more than {MAX_COMMAS} commas; send a shorter one."
            raise HTTPException(400, message)
        try:
            return from_json(body, allow_inf_nan=False)
        except ValueError as error:
            raise HTTPException(400, f"The body is not JSON: {error}") from None


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
    if server is None or not is_loopback_name(server[0]):
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
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def host_name(url: str) -> str:
    """The host name in the URL, in lower case. Empty if the URL has no host name."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def listening_socket(host: str, port: int) -> socket.socket:
    """A socket that already listens. So clients can connect before the server is up. Such clients
    wait until the server answers. An empty `host` means every address of this machine."""
    # If a name such as localhost has addresses of both families, take IPv4: some clients connect
    # only to 127.0.0.1.
    family, _, _, _, address = min(_resolve(host, port), key=lambda each: each[0] != socket.AF_INET)
    is_ipv6 = family == socket.AF_INET6
    return socket.create_server(address, family=family, backlog=2048, dualstack_ipv6=is_ipv6)


def is_only_loopback(host: str) -> bool:
    """Whether no other machine can reach a server that listens on `host`."""
    return all(ipaddress.ip_address(entry[4][0]).is_loopback for entry in _resolve(host, 0))


def _resolve(host: str, port: int) -> Sequence[tuple[Any, ...]]:
    return socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
