"""Binds the port, then starts the application behind it."""

import errno
import ipaddress
import socket

import uvicorn
from fastapi import FastAPI

from serving.errors import PortBusy, ServingError
from serving.settings import ServingSettings

SHUTDOWN_SECONDS = 10
"""For requests that are being answered when the server is told to stop."""


def serve(app: FastAPI, settings: ServingSettings) -> None:
    """Serve until SIGINT or SIGTERM. Raises ServingError, PortBusy among them.

    The socket listens before the application looks for a pending release. So a job that leaves one
    and then finds the port refused knows that the next server to start will see it; one that gets
    through has its swap request answered when the start is over.
    """
    with bind(settings) as listener:
        host, port = listener.getsockname()[:2]
        print(f"serving on http://{host}:{port}", flush=True)
        server = uvicorn.Server(
            uvicorn.Config(
                app,
                log_config=None,  # the process's own
                log_level="warning",
                access_log=False,
                lifespan="on",
                timeout_graceful_shutdown=SHUTDOWN_SECONDS,
            )
        )
        server.run(sockets=[listener])
    if not server.started:
        raise ServingError("the server did not start; its log says why")


def bind(settings: ServingSettings) -> socket.socket:
    """A listening socket. Raises PortBusy, or ServingError for an address that must not be used."""
    if settings.api_key is None and not _is_loopback(settings.host):
        raise ServingError(
            f"{settings.host} is reachable from other machines; set [serving] api_key, "
            "or listen on 127.0.0.1"
        )
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # With the protocol left at 0, asyncio does not take the connections for TCP and leaves out
    # TCP_NODELAY: 40 ms more for each answer.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((settings.host, settings.port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        if isinstance(error, socket.gaierror):
            raise ServingError(f"{settings.host} is no address to listen on: {error}") from None
        if error.errno == errno.EADDRINUSE:
            raise PortBusy(settings.host, settings.port) from None
        raise ServingError(f"cannot listen on {settings.host}:{settings.port}: {error}") from None
    return listener


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
