"""Opens a listening socket, and serves requests on it. The receiver and the hub use this module."""

import asyncio
import contextlib
import errno
import os
import socket
import threading
import time

import uvicorn

from receiver.errors import AddressUnavailable
from serving.http.server import freeze_imports, listening_socket

_HOW_TO_SET_ADDRESS = (
    "`host` and `port` under [receiver]. In a script, use `launch(server_name=…, server_port=…)` or"
    " `GRADIO_SERVER_PORT=… python app.py`; port 0 takes a free port"
)


def bind(host: str, port: int, *, how_to_set_address: str = _HOW_TO_SET_ADDRESS) -> socket.socket:
    """A socket that already listens (`serving/http/server.py`).

    Raises `AddressUnavailable` if the port is in use or not allowed, or if `host` is not an address
    of this machine. `how_to_set_address` says where the user can set another address. The error
    message ends with this text, except if `host` is not a valid name.
    """
    try:
        return listening_socket(host, port)
    except socket.gaierror as error:
        raise no_address(host, error) from error
    except OSError as error:
        reason = (
            f"Port {port} on {host} is in use by another program: stop that program, or choose"
            " another port."
            if error.errno == errno.EADDRINUSE
            else f"Cannot listen on {host}:{port}: {os.strerror(error.errno or 0)}."
        )
        raise AddressUnavailable(f"{reason} Set the address with {how_to_set_address}.") from error


def url_of(listening: socket.socket, host: str) -> str:
    """`http://host:port`, with the port on which the socket listens. If the socket was bound to
    port 0, the system has chosen this port."""
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{listening.getsockname()[1]}"


def is_inside_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def serve(server: uvicorn.Server, *listening: socket.socket) -> None:
    """Serve until SIGINT or SIGTERM. After SIGINT, this function returns. After SIGTERM, the
    process ends."""
    freeze_imports()
    with contextlib.suppress(KeyboardInterrupt):
        server.run(sockets=list(listening))


def serve_in_thread(server: uvicorn.Server, *listening: socket.socket) -> threading.Thread:
    """Serve in a thread until `server.should_exit` is set. Returns the thread as soon as the server
    answers requests. If the server cannot start, the returned thread has already ended."""

    thread = threading.Thread(
        target=server.run, args=(list(listening),), name="webhooks-server", daemon=True
    )
    thread.start()
    while not server.started and thread.is_alive():
        time.sleep(0.01)
    return thread


def no_address(host: str, error: OSError) -> AddressUnavailable:
    return AddressUnavailable(
        f"{host!r} is not a host name or address of this machine: {error.strerror}. Use another"
        " name, or an address such as 127.0.0.1."
    )
