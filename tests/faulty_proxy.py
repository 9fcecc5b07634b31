"""A TCP proxy that breaks what goes through it: one fault per connection, in turn."""

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Literal, get_args

Fault = Literal["none", "reset at once", "half a request", "reset", "half an answer", "late"]
FAULTS: tuple[Fault, ...] = get_args(Fault)
"""`reset` comes when the request was handled, in place of the answer. `late` holds the answer until
the client has gone."""

HALF_BYTES = 40
_RESET = struct.pack("ii", 1, 0)


class FaultyProxy:
    def __init__(self, port: int, faults: Iterator[Fault]) -> None:
        self.num_faults = dict.fromkeys(FAULTS, 0)
        self._port = port
        self._faults = faults
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        accepting = threading.Thread(target=self._accept)
        accepting.start()
        try:
            yield
        finally:
            self._listening.shutdown(socket.SHUT_RDWR)
            accepting.join()
            self._listening.close()

    def _accept(self) -> None:
        threads = []
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = self._listening.accept()
                fault = next(self._faults)
                self.num_faults[fault] += 1
                threads.append(threading.Thread(target=self._serve, args=(client, fault)))
                threads[-1].start()
        for thread in threads:
            thread.join()

    def _serve(self, client: socket.socket, fault: Fault) -> None:
        with client, socket.create_connection(("127.0.0.1", self._port)) as server:
            with contextlib.suppress(OSError):
                self._pass_on(client, server, fault)
            for each in (client, server):
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)

    def _pass_on(self, client: socket.socket, server: socket.socket, fault: Fault) -> None:
        """One request and its answer; the next one of the client meets another fault."""
        if fault == "reset at once":
            return
        request = _message(client)
        if fault == "half a request":
            server.sendall(request[:-HALF_BYTES])
            return
        server.sendall(request)
        answer = _message(server)
        if fault == "late":
            client.recv(1)
        elif fault == "half an answer":
            client.sendall(answer[:HALF_BYTES])
        elif fault == "none":
            client.sendall(answer)
            client.recv(1, socket.MSG_PEEK)


def _message(connection: socket.socket) -> bytes:
    """A whole HTTP message with a `Content-Length`."""
    received = b""
    while b"\r\n\r\n" not in received:
        received += _some(connection)
    head, _, body = received.partition(b"\r\n\r\n")
    lines = head.lower().split(b"\r\n")
    length = next(int(line[15:]) for line in lines if line.startswith(b"content-length:"))
    while len(body) < length:
        body += _some(connection)
    return head + b"\r\n\r\n" + body


def _some(connection: socket.socket) -> bytes:
    if not (found := connection.recv(65536)):
        raise ConnectionError("ended")
    return found
