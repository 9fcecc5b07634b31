"""The HTTP server of each service. It ends the connection of a client that makes no progress for
too long, or that sends too many requests or too large headers.

uvicorn itself has no such limits. It waits for ever for the rest of a request, and for a client to
read its answer.
"""

import asyncio
import contextlib
import gc
import ipaddress
import math
import socket
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import uvicorn
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

    def seconds(self, awaited: Awaited) -> float:
        """The time limit for what the client must do next."""
        limit: float = getattr(self, f"{awaited}_seconds")
        return limit


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
            self._make_room()

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

    def check_progress(self, now: float) -> Awaited | None:
        """What the client must do next; None if the server waits for the application and not for
        the client. Ends the connection if the client has exceeded its time limit."""
        awaited = self._awaited()
        found = (awaited, self.cycle)
        num_moved = self._moved(awaited)
        if found != self._checked or num_moved - self._num_moved >= MIN_BYTES:
            self._checked, self.progress_at, self._num_moved = found, now, num_moved
        elif awaited is not None and now - self.progress_at > self.limits.seconds(awaited):
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
        """How many bytes the client has read or sent; compare it only with an earlier result for
        the same `awaited`."""
        if awaited == "reading":
            return self._num_read()
        return self._num_received if awaited == "body" else 0

    def _num_read(self) -> int:
        """A number that grows by one with each byte that the client's operating system receives. It
        may start at any value, so compare it only with an earlier result."""
        if _TCP_INFO is not None:
            connection: socket.socket = self.transport.get_extra_info("socket")
            info = connection.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _ACKNOWLEDGED.stop)
            if len(info) == _ACKNOWLEDGED.stop:
                return int.from_bytes(info[_ACKNOWLEDGED], sys.byteorder)
        # The application writes nothing while a client must read, so the write buffer only shrinks.
        return -self.transport.get_write_buffer_size()

    def _make_room(self) -> None:
        now = self.loop.time()
        others = [one for one in self.connections if one is not self]
        waiting_for = [one for one in others if one.check_progress(now) is not None]
        min(waiting_for, key=lambda one: one.progress_at, default=self).end()


def http_config(
    app: ASGIApp,
    *,
    shutdown_seconds: int,
    limits: Limits | None = None,
    lifespan: Literal["auto", "on", "off"] = "auto",
) -> uvicorn.Config:
    """The settings for a `Server`.

    The server uses the logging of this process and does not log each request. When the server
    stops, requests that are still running get `shutdown_seconds` to end. A request that has not
    ended by then is answered with 503. If its answer has begun, its connection is closed.
    """

    class Limited(Connection):
        pass

    limits = limits or Limits()
    Limited.limits = limits
    return uvicorn.Config(
        _answer_at_stop(app),
        http=Limited,
        ws="none",  # so that `connections` has only connections of HTTP
        log_config=None,
        log_level="warning",
        access_log=False,
        timeout_keep_alive=math.ceil(limits.idle_seconds),
        lifespan=lifespan,
        timeout_graceful_shutdown=shutdown_seconds,
    )


def _answer_at_stop(app: ASGIApp) -> ASGIApp:
    """uvicorn cancels the requests that outlast its stop, and would answer them with 500."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        has_started = False

        async def noted(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            await app(scope, receive, noted)
        except asyncio.CancelledError:
            if scope["type"] != "http":
                raise
            if not has_started:
                stopped = PlainTextResponse(
                    "The server stopped before it could answer. Send the request again.\n",
                    status_code=503,
                    headers={"Retry-After": "1"},
                )
                await stopped(scope, receive, send)

    return answer


def freeze_imports() -> None:
    """Exclude all objects that exist now, mainly imported modules, from garbage collection. They
    live as long as the process. Otherwise each full collection would take about 0.1 s, and during
    this time no request would be answered, and no stream would get a token."""
    gc.collect()
    gc.freeze()


class Server(uvicorn.Server):
    """uvicorn's server, which also checks from time to time whether its clients make progress."""

    async def on_tick(self, counter: int) -> bool:
        if counter % _TICKS_PER_CHECK == 0:
            now = asyncio.get_running_loop().time()
            connections: list[Any] = list(self.server_state.connections)
            for connection in connections:
                connection.check_progress(now)
        return await super().on_tick(counter)


def listening_socket(host: str, port: int) -> socket.socket:
    """A socket that already listens. So clients can connect before the server is up. Such clients
    wait until the server answers. An empty `host` means every address of this machine."""
    # If a name such as localhost has addresses of both families, take IPv4: some clients connect
    # only to 127.0.0.1.
    family, _, _, _, address = min(_resolve(host, port), key=lambda each: each[0] != socket.AF_INET)
    # Nagle's algorithm can delay an answer by 40 ms. asyncio turns it off, but only for a socket
    # that was made with IPPROTO_TCP, so pass this protocol.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(2048)
    except BaseException:
        listening.close()
        raise
    return listening


def is_only_loopback(host: str) -> bool:
    """Whether no other machine can reach a server that listens on `host`."""
    addresses = {entry[4][0] for entry in _resolve(host, 0)}
    return all(ipaddress.ip_address(address).is_loopback for address in addresses)


def _resolve(host: str, port: int) -> Sequence[tuple[Any, ...]]:
    return socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
