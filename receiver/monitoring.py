"""Two routes with which other programs watch a receiver: `/metrics` for Prometheus, and `/live` for
`pipeline up`."""

import time
from collections.abc import Sequence

from fastapi import FastAPI, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jobs.errors import StoreError
from jobs.store import JobStore

_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 15)


def measure(app: FastAPI) -> None:
    """Count the requests to `/webhooks/…`, measure how long their answers take, and add the route
    `/metrics`. Call this function before the app serves requests."""
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

    @app.get("/metrics", response_class=PlainTextResponse)
    def metrics() -> Response:
        return Response(generate_latest(registry), media_type="text/plain; version=0.0.4")

    app.add_middleware(_Measured, routes=app.routes, requests=requests, seconds=seconds)


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


class _Measured:
    def __init__(
        self, app: ASGIApp, routes: Sequence[BaseRoute], requests: Counter, seconds: Histogram
    ) -> None:
        self._app = app
        self._routes = routes
        self._requests = requests
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith("/webhooks/"):
            await self._app(scope, receive, send)
            return
        began, status = time.perf_counter(), 500

        async def count(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, count)
        finally:
            # Count all unknown paths under the name `other`. In Prometheus, each path has its own
            # time series. So if unknown paths were counted one by one, a stranger could create any
            # number of series. Look for the path among the routes, because the status is no help: a
            # 403 is the answer to some unknown paths, but also to a refused request to a handler.
            is_known = any(getattr(route, "path", None) == scope["path"] for route in self._routes)
            path = scope["path"] if is_known else "other"
            self._requests.labels(path, status).inc()
            self._seconds.labels(path).observe(time.perf_counter() - began)
