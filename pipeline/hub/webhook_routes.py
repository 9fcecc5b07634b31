"""API: webhooks as `HfApi` manages them, and their activity for our own command."""

from dataclasses import asdict
from typing import get_args

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from pipeline.hub import outbox, webhooks
from pipeline.hub.answers import iso_time, query_int, read_json
from pipeline.hub.errors import BadRequest
from pipeline.hub.outbox import Delivery, DeliveryStatus
from pipeline.hub.service import hub_of
from pipeline.hub.webhooks import CreateWebhook, UpdateWebhook, Webhook

_BASE = "/api/settings/webhooks"


def routes() -> list[Route]:
    return [
        Route(_BASE, list_all, methods=["GET"]),
        Route(_BASE, create, methods=["POST"]),
        Route(f"{_BASE}/{{id}}", show, methods=["GET"]),
        Route(f"{_BASE}/{{id}}", change, methods=["POST"]),
        Route(f"{_BASE}/{{id}}", remove, methods=["DELETE"]),
        Route(f"{_BASE}/{{id}}/enable", enable, methods=["POST"]),
        Route(f"{_BASE}/{{id}}/disable", disable, methods=["POST"]),
        Route(f"{_BASE}/{{id}}/deliveries", list_deliveries, methods=["GET"]),
        Route(f"{_BASE}/{{id}}/deliveries/{{delivery_id}}/replay", replay, methods=["POST"]),
    ]


async def list_all(request: Request) -> Response:
    hub = hub_of(request)

    def read() -> list[Webhook]:
        with hub.database.read() as connection:
            return webhooks.list_webhooks(connection)

    found = await run_in_threadpool(read)
    return JSONResponse([webhooks.as_json(webhook) for webhook in found])


async def show(request: Request) -> Response:
    hub = hub_of(request)

    def read() -> Webhook:
        with hub.database.read() as connection:
            return webhooks.get_webhook(connection, request.path_params["id"])

    return _answer(await run_in_threadpool(read))


async def create(request: Request) -> Response:
    hub = hub_of(request)
    body = await read_json(request, CreateWebhook)
    _refuse_jobs(body)
    if body.url is None:
        raise BadRequest("url: a webhook needs the URL that it calls.")

    def act() -> Webhook:
        with hub.database.write() as connection:
            return webhooks.create_webhook(connection, body, hub.box)

    created = webhooks.as_json(await run_in_threadpool(act))
    if body.secret:
        created["secret"] = body.secret
    return JSONResponse({"webhook": created})


async def change(request: Request) -> Response:
    hub = hub_of(request)
    body = await read_json(request, UpdateWebhook)
    _refuse_jobs(body)

    def act() -> Webhook:
        with hub.database.write() as connection:
            return webhooks.update_webhook(connection, request.path_params["id"], body, hub.box)

    return _answer(await run_in_threadpool(act))


async def enable(request: Request) -> Response:
    """What was pending when the webhook was disabled is sent now."""
    changed = await _set_disabled(request, False)
    hub_of(request).log.wake()
    return changed


async def disable(request: Request) -> Response:
    return await _set_disabled(request, True)


async def remove(request: Request) -> Response:
    hub = hub_of(request)

    def act() -> None:
        with hub.database.write() as connection:
            webhooks.delete_webhook(connection, request.path_params["id"])

    await run_in_threadpool(act)
    return JSONResponse({})


async def list_deliveries(request: Request) -> Response:
    """Newest first; `?status=pending|delivered|dead`, `?limit=` (100 unless told, 1000 at most)."""
    hub = hub_of(request)
    limit = query_int(request, "limit", 100, at_most=1000)
    status = request.query_params.get("status")
    if status is not None and status not in get_args(DeliveryStatus):
        raise BadRequest(f"status={status!r}: choose pending, delivered or dead.")

    def read() -> list[dict[str, object]]:
        id = request.path_params["id"]
        with hub.database.read() as connection:
            webhooks.get_webhook(connection, id)
            found = outbox.list_deliveries(
                connection,
                id,
                status=status,  # type: ignore[arg-type]
                limit=limit,
            )
            return [_delivery(delivery) for delivery in found]

    return JSONResponse(await run_in_threadpool(read))


async def replay(request: Request) -> Response:
    """Sends a delivery again under its old id, to the webhook's present URL and secret."""
    hub = hub_of(request)

    def act() -> Delivery:
        with hub.database.write() as connection:
            id = request.path_params["id"]
            webhooks.get_webhook(connection, id)
            return outbox.replay(connection, id, request.path_params["delivery_id"])

    delivery = await run_in_threadpool(act)
    hub.log.wake()
    return JSONResponse({"delivery": _delivery(delivery)})


async def _set_disabled(request: Request, disabled: bool) -> Response:
    hub = hub_of(request)

    def act() -> Webhook:
        with hub.database.write() as connection:
            return webhooks.set_disabled(connection, request.path_params["id"], disabled)

    return _answer(await run_in_threadpool(act))


def _answer(webhook: Webhook) -> Response:
    return JSONResponse({"webhook": webhooks.as_json(webhook)})


def _refuse_jobs(body: CreateWebhook | UpdateWebhook) -> None:
    if body.jobSourceId is not None or body.secrets is not None:
        raise BadRequest(
            "This hub's webhooks call a URL: in place of a job and its secrets give `url`, "
            "as in http://127.0.0.1:7860/webhooks/retrain."
        )


def _delivery(delivery: Delivery) -> dict[str, object]:
    times = ("created_at", "next_attempt_at", "last_attempt_at")
    facts: dict[str, object] = asdict(delivery)
    for name in times:
        value = getattr(delivery, name)
        facts[name] = None if value is None else iso_time(value)
    return facts
