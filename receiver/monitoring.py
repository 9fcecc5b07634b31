"""Two routes with which other programs watch a receiver: `/metrics` for Prometheus, and `/live` for
`pipeline up`."""

from fastapi import FastAPI, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

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

    def count(path: str, status: int, duration: float) -> None:
        requests.labels(path, status).inc()
        seconds.labels(path).observe(duration)

    server.on_answer = count

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
