"""Two routes with which other programs watch a receiver: `/metrics` for Prometheus, and `/live` for
`pipeline up`."""

import time

from fastapi import FastAPI, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jobs.errors import StoreError
from jobs.store import JobStore
from receiver.webhooks_server import WebhooksServer

_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 15)


def measure(server: WebhooksServer) -> None:
    """Count the requests to the handlers, measure how long their answers take, and add the route
    `/metrics`."""
    registry = CollectorRegistry()
    requests = Counter(
        "receiver_requests",
        "Requests by path and HTTP status, including refused requests",
        ["path", "status"],
        registry=registry,
    )
    seconds = Histogram(
        "receiver_seconds",
        "Seconds from a request to its answer",
        ["path"],
        buckets=_SECONDS,
        registry=registry,
    )

    class Measured:
        def __init__(self, app: ASGIApp) -> None:
            self._app = app

        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
            if path not in server.registered_webhooks:
                await self._app(scope, receive, send)
                return

            # If the handler raises an error, Starlette answers 500, after this function has ended.
            status, began = 500, time.perf_counter()

            async def send_noting_status(message: Message) -> None:
                nonlocal status
                status = message.get("status", status)
                await send(message)

            try:
                await self._app(scope, receive, send_noting_status)
            finally:
                requests.labels(path, status).inc()
                seconds.labels(path).observe(time.perf_counter() - began)

    server.app.add_middleware(Measured)

    @server.app.get("/metrics", response_class=PlainTextResponse)
    def metrics() -> Response:
        return Response(generate_latest(registry), media_type="text/plain; version=0.0.4")


def add_live_route(app: FastAPI, store: JobStore) -> None:
    """Add the route `/live`, which reads the job store before it answers. `pipeline up` requests
    this route again and again, and restarts the receiver if there is no answer for some time. Call
    this function before the app serves requests.

    If the store fails, the answer has status 200 and names the error. If the answer had status 503,
    `pipeline up` would restart the receiver, but a restart does not repair a database.
    """

    @app.get("/live")
    def alive() -> dict[str, str]:
        try:
            store.list(limit=1)
        except StoreError as error:
            return {"status": "ok", "database": str(error)}
        return {"status": "ok"}
