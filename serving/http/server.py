"""Makes the HTTP server of a service."""

from typing import Literal

import uvicorn
from starlette.types import ASGIApp

from serving.http.connections import Connection, Limits, connections_of

_TICKS_PER_LOOK = 2
"""uvicorn ticks ten times a second."""


def http_config(
    app: ASGIApp,
    *,
    shutdown_seconds: int,
    limits: Limits | None = None,
    lifespan: Literal["auto", "on", "off"] = "auto",
) -> uvicorn.Config:
    """The settings of a `Server` that uses the logging of this process, and does not log each
    request.

    When the server is told to stop, requests that are being answered get `shutdown_seconds` to end.
    """

    class Limited(Connection):
        pass

    Limited.limits = limits or Limits()
    return uvicorn.Config(
        app,
        http=Limited,
        log_config=None,
        log_level="warning",
        access_log=False,
        lifespan=lifespan,
        timeout_graceful_shutdown=shutdown_seconds,
    )


class Server(uvicorn.Server):
    """Looks at its clients from time to time."""

    async def on_tick(self, counter: int) -> bool:
        if counter % _TICKS_PER_LOOK == 0 and self.server_state.connections:
            connections = connections_of(self.server_state.connections)
            now = connections[0].loop.time() if connections else 0.0
            for connection in connections:
                connection.look(now)
        return await super().on_tick(counter)
