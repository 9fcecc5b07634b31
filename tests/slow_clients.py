"""Clients on plain sockets that stop in the middle, and ways to see how they end."""

import contextlib
import select
import socket
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

RECEIVE_BYTES = 4096


@contextlib.contextmanager
def connected(url: str, *, reads_little: bool = False) -> Iterator[socket.socket]:
    parts = urlsplit(url)
    assert parts.hostname is not None
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as client:
        if reads_little:
            # So that the answer waits in the server soon, and not in the system.
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
        client.connect((parts.hostname, parts.port))
        yield client


def request(
    url: str, method: str, path: str, *, num_bytes: int | None = None, **headers: str
) -> bytes:
    """A request's head, which announces a body of so many bytes."""
    lines = [f"{method} {path} HTTP/1.1", f"Host: {urlsplit(url).netloc}"]
    headers = {"Content_Type": "application/json", **headers}
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    if num_bytes is not None:
        lines.append(f"Content-Length: {num_bytes}")
    return "\r\n".join([*lines, "", ""]).encode()


def is_ended(client: socket.socket, *, within_seconds: float = 0) -> bool:
    """Whether the server has ended the connection. Reads nothing."""
    poll = select.poll()
    poll.register(client, select.POLLRDHUP)
    return bool(poll.poll(within_seconds * 1000))


def num_ended(clients: list[socket.socket]) -> int:
    return sum(is_ended(client) for client in clients)


def outlive(
    clients: dict[str, socket.socket], drips: dict[str, bytes], *, within_seconds: float
) -> list[str]:
    """The names of the clients that the server has not ended in time. Over some of the connections
    something comes all the time."""
    end = time.monotonic() + within_seconds
    left = dict(clients)
    while left and time.monotonic() < end:
        left = {name: client for name, client in left.items() if not is_ended(client)}
        for name in left.keys() & drips:
            with contextlib.suppress(ConnectionError):
                left[name].sendall(drips[name])
        time.sleep(0.02)
    return list(left)
