"""The socket a receiver listens on, and the uvicorn server behind it."""

import asyncio
import contextlib
import errno
import gc
import ipaddress
import os
import socket
import threading
from collections.abc import Sequence

import uvicorn

from receiver.errors import AddressUnavailable, OpenToEveryone


def refuse_beyond_loopback(host: str, unproven: Sequence[str]) -> None:
    """Raise `OpenToEveryone` if `host` can be reached from another machine."""
    addresses = {entry[4][0] for entry in _resolve(host, 0)}
    if not all(ipaddress.ip_address(address).is_loopback for address in addresses):
        raise OpenToEveryone(
            f"{host or 'every address'} can be reached from other machines, and there is no secret"
            f" for {', '.join(unproven) or 'the handlers'}: set `WEBHOOK_SECRET`, pass"
            " `webhook_secret=`, or listen on 127.0.0.1."
        )


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens already: who connects before the server is up waits, and is served."""
    family, _, _, _, address = _resolve(host, port)[0]
    # Without the protocol's number asyncio leaves Nagle's algorithm on: 40 ms for each answer.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    if os.name == "posix":
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(address)
        listening.listen(2048)
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRINUSE:
            raise AddressUnavailable(
                f"Port {port} on {host} is in use by another program: stop that, or take another"
                f" (0 finds one). For a script: `GRADIO_SERVER_PORT={port + 1} python app.py`, or"
                " `launch(server_port=...)`; for the stack's receiver: `port` under [receiver]."
            ) from error
        raise AddressUnavailable(
            f"Cannot listen on {host}:{port}: {error.strerror}. Give another `server_name` or"
            " `server_port` to `launch`, or change the receiver's `host` and `port` settings."
        ) from error
    return listening


def url_of(listening: socket.socket, host: str) -> str:
    """`http://host:port`, with the port that the system gave."""
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{listening.getsockname()[1]}"


def address_of(listening: socket.socket, host: str) -> str:
    """`host:port` to reach it from this machine."""
    own = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return url_of(listening, own).removeprefix("http://")


def is_inside_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def serve(server: uvicorn.Server, listening: socket.socket) -> None:
    """Until SIGINT, which ends it quietly, or SIGTERM, which ends the process too."""
    # What was imported lives as long as the process: to look through it for garbage again and again
    # would stop every sender for some 0.1 s each time.
    gc.collect()
    gc.freeze()
    with listening, contextlib.suppress(KeyboardInterrupt):
        server.run(sockets=[listening])


def serve_in_thread(server: uvicorn.Server, listening: socket.socket) -> threading.Thread:
    """Until `server.should_exit`. Returns at once; the socket answers already."""

    def run() -> None:
        with listening:
            server.run(sockets=[listening])

    thread = threading.Thread(target=run, name="webhooks-server", daemon=True)
    thread.start()
    return thread


_Address = tuple[socket.AddressFamily, socket.SocketKind, int, str, tuple[str, int]]


def _resolve(host: str, port: int) -> list[_Address]:
    try:
        found = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise AddressUnavailable(
            f"{host!r} is no host name or address of this machine: {error.strerror}."
        ) from error
    return found  # type: ignore[return-value]  # stream sockets over IP only
