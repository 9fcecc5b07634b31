"""A connection that ends when its client does nothing for too long.

uvicorn alone waits without end for the rest of a request, and for a client to read its answer.
"""

import asyncio
import contextlib
import socket
import struct
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from uvicorn.protocols.http.h11_impl import H11Protocol as HttpProtocol
else:
    from uvicorn.protocols.http.auto import AutoHTTPProtocol as HttpProtocol

MIN_BYTES = 4096
"""A client goes on with a body, or with reading an answer, if it moves this much in the time that
it has. Else a client could hold a connection by one byte now and then."""

MAX_HEADER_BYTES = 64 * 1024

MAX_PIPELINED = 100
"""Requests that a client sends before it has the answer to the first."""

_RESET = struct.pack("ii", 1, 0)

_TCP_INFO: int | None = getattr(socket, "TCP_INFO", None) if sys.platform == "linux" else None
_ACKNOWLEDGED = slice(120, 128)
"""`tcpi_bytes_acked` in linux/tcp.h. uvloop's own count does not fall before a write is done."""

Awaited = Literal["headers", "body", "reading"]
"""What the client has to do next."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How many clients there may be, and how long each may do nothing."""

    max_connections: int = 512
    """Connections that are open at once. If another one comes, the client that has done nothing for
    longest loses its connection."""
    headers_seconds: float = 15
    """From the start of the connection, or the end of the last answer, to the end of the headers of
    a request."""
    body_seconds: float = 30
    """Within this time the body of a request must go on."""
    reading_seconds: float = 60
    """Within this time a client must go on to read an answer that waits for it."""

    def seconds(self, awaited: Awaited) -> float:
        if awaited == "headers":
            return self.headers_seconds
        return self.body_seconds if awaited == "body" else self.reading_seconds


class Connection(HttpProtocol):
    """uvicorn's connection, with a look at its client from time to time."""

    limits: Limits

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.since = self.loop.time()
        """When the client last did something."""
        self._look: tuple[Awaited | None, object] = ("headers", None)
        self._num_moved = 0
        self._num_received = 0
        self._num_header_bytes = 0
        if len(self.connections) > self.limits.max_connections:
            self._make_room()

    def data_received(self, data: bytes) -> None:
        self._num_received += len(data)
        super().data_received(data)
        # httptools parses all requests that came together, before the first one is answered.
        if len(getattr(self, "pipeline", ())) > MAX_PIPELINED:
            self.end()
            return
        # httptools keeps headers of any size. The scope is made anew where a request begins, and
        # the cycle when its headers are complete.
        if self.cycle is not None and self.cycle.scope is self.scope:
            self._num_header_bytes = 0
            return
        self._num_header_bytes += len(data)
        if self._num_header_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The headers are larger than {MAX_HEADER_BYTES} bytes.")

    def resume_writing(self) -> None:
        super().resume_writing()
        # The client has read most of what had waited for it: its time begins anew.
        self._look = (None, None)

    def look(self, now: float) -> Awaited | None:
        """What the client must do next; None if it is not its turn. Ends the connection if the
        client has not done it in its time."""
        awaited = self._awaited()
        look = (awaited, self.cycle)
        num_moved = self._moved(awaited)
        if look != self._look or num_moved - self._num_moved >= MIN_BYTES:
            self._look, self.since, self._num_moved = look, now, num_moved
        elif awaited is not None and now - self.since > self.limits.seconds(awaited):
            self.end()
        return awaited

    def end(self) -> None:
        """Now, without what waits for a client that does not read."""
        if self.transport.get_write_buffer_size():
            connection: socket.socket = self.transport.get_extra_info("socket")
            # Else the system too would keep unread bytes, and go on to offer them.
            with contextlib.suppress(OSError):  # the client has ended it already
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
            return "reading" if self.transport.get_write_buffer_size() else "headers"
        # If reading is paused, the application has not taken the body that is there.
        is_sending = cycle.more_body and not cycle.waiting_for_100_continue
        return "body" if is_sending and not self.flow.read_paused else None

    def _moved(self, awaited: Awaited | None) -> int:
        if awaited == "reading":
            return self._num_read()
        return self._num_received if awaited == "body" else 0

    def _num_read(self) -> int:
        """How many bytes the client's system has taken, from any count on."""
        if _TCP_INFO is not None:
            connection: socket.socket = self.transport.get_extra_info("socket")
            info = connection.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _ACKNOWLEDGED.stop)
            if len(info) == _ACKNOWLEDGED.stop:
                return int.from_bytes(info[_ACKNOWLEDGED], sys.byteorder)
        # Nothing is written while an answer waits: the buffer shrinks as the client reads.
        return -self.transport.get_write_buffer_size()

    def _make_room(self) -> None:
        now = self.loop.time()
        others = [one for one in connections_of(self.connections) if one is not self]
        idle = [one for one in others if one.look(now) is not None]
        min(idle, key=lambda one: one.since, default=self).end()


def connections_of(protocols: Iterable[Any]) -> list[Connection]:
    """Without those that have become web sockets."""
    return [one for one in protocols if isinstance(one, Connection)]
