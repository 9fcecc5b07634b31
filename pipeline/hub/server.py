"""Binds the hub's port, then serves the application behind it."""

import errno
import gc
import socket

import uvicorn
from starlette.types import ASGIApp

from pipeline.hub.errors import HubError
from pipeline.hub.settings import HubSettings

GRACE_SECONDS = 10
"""What a push that is under way has to finish in, when the hub is stopped."""


def serve(app: ASGIApp, settings: HubSettings) -> None:
    """Serve until SIGINT or SIGTERM. Raises HubError for a port that is taken."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # Named, the protocol lets asyncio send answers at once instead of waiting for acknowledgements.
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((settings.host, settings.port))
            listener.listen(2048)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise HubError(
                    f"port {settings.port} on {settings.host} is in use by another program; stop "
                    "that, or move the hub: --port, or port under [hub] in pipeline.toml"
                ) from None
            raise HubError(
                f"cannot listen on {settings.host}:{settings.port}: {error.strerror}"
            ) from None
        print(f"hub on {settings.url}", flush=True)
        config = uvicorn.Config(
            app,
            log_config=None,  # the process's own
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=GRACE_SECONDS,
        )
        # What was imported lives as long as the process; looking through it for garbage again and
        # again would keep pushes and deliveries waiting.
        gc.collect()
        gc.freeze()
        uvicorn.Server(config).run(sockets=[listener])
