"""Makes the HTTP server of a service."""

import gc
import math
from typing import Literal

import uvicorn
from starlette.types import ASGIApp

from serving.http.connections import Connection, Limits, connections_of

_TICKS_PER_CHECK = 2
"""uvicorn calls `on_tick` ten times a second, so clients are checked five times a second."""


def http_config(
    app: ASGIApp,
    *,
    shutdown_seconds: int,
    limits: Limits | None = None,
    lifespan: Literal["auto", "on", "off"] = "auto",
) -> uvicorn.Config:
    """The settings for a `Server`.

    The server uses the logging of this process and does not log each request. When the server
    stops, requests that are still running get `shutdown_seconds` to end.
    """

    class Limited(Connection):
        pass

    limits = limits or Limits()
    Limited.limits = limits
    return uvicorn.Config(
        app,
        http=Limited,
        log_config=None,
        log_level="warning",
        access_log=False,
        timeout_keep_alive=math.ceil(limits.idle_seconds),
        lifespan=lifespan,
        timeout_graceful_shutdown=shutdown_seconds,
    )


def freeze_imports() -> None:
    """Exclude all objects that exist now, mainly imported modules, from garbage collection. They
    live as long as the process. Otherwise each full collection would take about 0.1 s, and during
    this time no request would be answered, and no stream would get a token."""
    gc.collect()
    gc.freeze()


class Server(uvicorn.Server):
    """uvicorn's server, which also checks from time to time whether its clients make progress."""

    async def on_tick(self, counter: int) -> bool:
        if counter % _TICKS_PER_CHECK == 0 and self.server_state.connections:
            connections = connections_of(self.server_state.connections)
            now = connections[0].loop.time() if connections else 0.0
            for connection in connections:
                connection.check_progress(now)
        return await super().on_tick(counter)
