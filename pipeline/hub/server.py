"""Serves the hub's application on the configured host and port."""

from starlette.types import ASGIApp

from pipeline.hub.settings import HubSettings
from receiver import listen
from serving.http.server import Server, http_config

SHUTDOWN_SECONDS = 10
"""How long the hub waits for unfinished requests when it is told to stop."""


def serve(app: ASGIApp, settings: HubSettings) -> None:
    """Serve until SIGINT or SIGTERM. Raises AddressUnavailable if the port is in use."""
    listening = listen.bind(
        settings.host,
        settings.port,
        how_to_set_address=(
            "`--host` and `--port`, or `host` and `port` under [hub] in pipeline.toml"
        ),
    )
    print(f"hub on {settings.url}", flush=True)
    listen.serve(Server(http_config(app, shutdown_seconds=SHUTDOWN_SECONDS)), listening)
