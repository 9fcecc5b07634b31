"""What the receiver of a stack adds to `WebhooksServer`: the handler that starts retrainings, and
two routes with which other programs watch the receiver: `/metrics` for Prometheus, and `/live` for
`pipeline up`.

The handler submits a job for each push to a ref of a dataset (normally a branch) that a pipeline
follows. It ignores all other events, and its answer says why an event was ignored.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

import anyio
import anyio.to_thread
from fastapi import FastAPI, Request, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CollectorRegistry, Counter, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jobs.errors import StoreError
from jobs.job import Delivery, JobRequest
from jobs.store import JobStore
from receiver.payload import WebhookPayload
from receiver.rules import RetrainRule, decide
from receiver.webhooks_server import WebhooksServer

logger = logging.getLogger(__name__)

Answer = dict[str, str | list[str]]


def retrain_handler(
    store: JobStore, rules: Sequence[RetrainRule]
) -> Callable[[WebhookPayload, Request], Awaitable[Answer]]:
    """A handler for `WebhooksServer.add_webhook("/retrain", knows_repeats=True)`. The argument
    `knows_repeats` says that the handler itself recognises repeated deliveries.

    The handler answers `{"job": id}` after the job and the delivery were stored. If several
    pipelines follow the ref, the answer also has `"jobs"`, a list of the ids of all their jobs. If
    an event needs no job, the answer is `{"ignored": reason}`.

    A job trains on the head of the ref when it starts, and not on the commit of the event. So it
    does not matter in which order deliveries arrive, or whether some are lost. If a sender repeats
    a delivery, the answer names the job that is recorded for it. But if this job failed or was
    cancelled, the delivery is handled like a new one.
    """
    arrived: list[tuple[list[JobRequest], asyncio.Future[list[str]]]] = []
    writing = anyio.Lock()

    async def submit(requests: list[JobRequest]) -> list[str]:
        """Returns the ids of the jobs."""
        ids: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()
        arrived.append((requests, ids))
        # Only one transaction runs at a time. The first event that gets the lock stores all events
        # that have arrived meanwhile, so that they wait for the disk only once.
        async with writing:
            # An event that was stored meanwhile stores no other: those that come one by one behind
            # it would then be stored one by one.
            if not ids.done():
                batch, arrived[:] = arrived[:], []
                try:
                    asked = [one for requests, _ in batch for one in requests]
                    stored = iter(await anyio.to_thread.run_sync(store.submit_all, asked))
                except Exception as error:
                    for _, waiting in batch:
                        waiting.set_exception(error)
                else:
                    for requests, waiting in batch:
                        waiting.set_result([next(stored).id for _ in requests])
        return await ids

    async def retrain(payload: WebhookPayload, request: Request) -> Answer:
        delivery_id = request.state.delivery_id
        extra = {"delivery_id": delivery_id}
        specs = decide(payload, rules)
        if isinstance(specs, str):
            logger.info("delivery %s: %s", delivery_id, specs, extra=extra)
            return {"ignored": specs}
        # The source of each delivery contains the pipeline's name. Without this name, all requests
        # of one event would have the same source and the same delivery id. The store would then
        # take the second request for a repeat of the first.
        webhook, body = _storable(payload.webhook.id), await request.json()
        ids = await submit(
            [
                JobRequest(
                    spec=spec,
                    payload=body,
                    delivery=Delivery(source=f"{webhook}/{spec.pipeline}", id=delivery_id),
                )
                for spec in specs
            ]
        )
        logger.info("delivery %s: job %s", delivery_id, ids[0], extra=extra | {"job_id": ids[0]})
        return {"job": ids[0]} if len(ids) == 1 else {"job": ids[0], "jobs": ids}

    return retrain


def _storable(text: str) -> str:
    """The text, escaped to ASCII and cut to 200 characters. Without the escapes, databases would
    refuse some characters, such as NUL and lone surrogates."""
    return ascii(text)[1:-1][:200]


def measure(server: WebhooksServer) -> None:
    """Count the requests to the handlers, and add the route `/metrics`."""
    registry = CollectorRegistry()
    requests = Counter(
        "receiver_requests",
        "Requests by path and HTTP status, including refused requests",
        ["path", "status"],
        registry=registry,
    )

    def measured(app: ASGIApp) -> ASGIApp:
        async def call(scope: Scope, receive: Receive, send: Send) -> None:
            path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
            if path not in server.registered_webhooks:
                await app(scope, receive, send)
                return

            # If the handler raises an error, Starlette answers 500, after this function has ended.
            status = 500

            async def send_noting_status(message: Message) -> None:
                nonlocal status
                status = message.get("status", status)
                await send(message)

            try:
                await app(scope, receive, send_noting_status)
            finally:
                requests.labels(path, status).inc()

        return call

    server.app.add_middleware(measured)

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
