"""Makes the HTTP server of a service."""

from typing import Literal

import uvicorn
from starlette.types import ASGIApp

from edge.connections import Connection, Limits, connections_of

_TICKS_PER_LOOK = 2
"""uvicorn ticks ten times a second."""


def http_server(
    app: ASGIApp,
    *,
    shutdown_seconds: int,
    limits: Limits | None = None,
    lifespan: Literal["auto", "on", "off"] = "auto",
) -> uvicorn.Server:
    """A server that uses the logging of this process, and does not log each request.

    When the server is told to stop, requests that are being answered get `shutdown_seconds` to end.
    """

    class Limited(Connection):
        pass

    Limited.limits = limits or Limits()
    config = uvicorn.Config(
        app,
        http=Limited,
        log_config=None,
        log_level="warning",
        access_log=False,
        lifespan=lifespan,
        timeout_graceful_shutdown=shutdown_seconds,
    )
    return _Server(config)


class _Server(uvicorn.Server):
    async def on_tick(self, counter: int) -> bool:
        if counter % _TICKS_PER_LOOK == 0 and self.server_state.connections:
            connections = connections_of(self.server_state.connections)
            now = connections[0].loop.time() if connections else 0.0
            for connection in connections:
                connection.look(now)
        return await super().on_tick(counter)
