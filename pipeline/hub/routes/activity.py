"""API routes that list deliveries, replay a delivery, or send a test event."""

import secrets
import time
from dataclasses import asdict
from typing import get_args

from sqlalchemy import Connection
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from pipeline.hub.errors import BadRequest
from pipeline.hub.http_json import iso_time, query_int
from pipeline.hub.repositories.names import RepositoryName
from pipeline.hub.repositories.store import Repository
from pipeline.hub.service import Hub, hub_of
from pipeline.hub.webhooks import outbox
from pipeline.hub.webhooks.activity import (
    OutboxDelivery,
    get_delivery,
    list_deliveries,
    replay_delivery,
)
from pipeline.hub.webhooks.outbox import DeliveryStatus
from pipeline.hub.webhooks.store import StoredWebhook, get_webhook

_WEBHOOK = "/api/settings/webhooks/{id}"


def routes() -> list[Route]:
    return [
        Route("/api/settings/deliveries", list_all, methods=["GET"]),
        Route("/api/settings/deliveries/{delivery_id}", show, methods=["GET"]),
        Route("/api/settings/deliveries/{delivery_id}/replay", replay_any, methods=["POST"]),
        Route(f"{_WEBHOOK}/deliveries", list_of_webhook, methods=["GET"]),
        Route(f"{_WEBHOOK}/deliveries/{{delivery_id}}/replay", replay_one, methods=["POST"]),
        Route(f"{_WEBHOOK}/test", send_test, methods=["POST"]),
    ]


async def list_all(request: Request) -> Response:
    """The deliveries of all webhooks, newest first. Takes the same query as `list_of_webhook`."""
    return await _list(request, None)


async def list_of_webhook(request: Request) -> Response:
    """The deliveries of one webhook, newest first. `?status=` is pending, delivered or dead;
    `?limit=` is 100 by default and 1000 at most."""
    return await _list(request, request.path_params["id"])


async def _list(request: Request, webhook_id: str | None) -> Response:
    hub = hub_of(request)
    limit = query_int(request, "limit", 100, at_most=1000)
    status = request.query_params.get("status")
    if status is not None and status not in get_args(DeliveryStatus):
        raise BadRequest(f"status={status!r}: choose pending, delivered or dead.")

    def read() -> list[dict[str, object]]:
        with hub.database.read() as connection:
            if webhook_id is not None:
                get_webhook(connection, webhook_id)
            found = list_deliveries(
                connection,
                webhook_id,
                status=status,  # type: ignore[arg-type]
                limit=limit,
            )
            return [as_json(delivery) for delivery in found]

    return JSONResponse(await run_in_threadpool(read))


async def show(request: Request) -> Response:
    hub = hub_of(request)
    delivery_id = request.path_params["delivery_id"]

    def read() -> OutboxDelivery:
        with hub.database.read() as connection:
            return get_delivery(connection, None, delivery_id)

    return JSONResponse({"delivery": as_json(await run_in_threadpool(read))})


async def replay_one(request: Request) -> Response:
    """Sends a delivery again, to the webhook's present URL. With `?force=1`, the delivery gets a
    new id, so that the receiver handles it again."""
    return await _replay(request, request.path_params["id"])


async def replay_any(request: Request) -> Response:
    """As `replay_one`, without the id of the webhook."""
    return await _replay(request, None)


async def _replay(request: Request, webhook_id: str | None) -> Response:
    hub = hub_of(request)
    force = query_int(request, "force", 0, at_most=1) == 1
    delivery_id = request.path_params["delivery_id"]
    delivery = await run_in_threadpool(replay, hub, webhook_id, delivery_id, force=force)
    return JSONResponse({"delivery": as_json(delivery)})


def replay(hub: Hub, webhook_id: str | None, delivery_id: str, *, force: bool) -> OutboxDelivery:
    """Makes a delivery due again. If `webhook_id` is None, the delivery's webhook is looked up.
    Raises WebhookNotFound, and BadRequest if the webhook is disabled."""
    with hub.database.write() as connection:
        id = get_delivery(connection, webhook_id, delivery_id).webhook_id
        webhook = get_webhook(connection, id)
        _check_enabled(webhook)
        delivery = replay_delivery(connection, id, delivery_id, force=force)
        outbox.retry_now(connection, webhook)
    hub.log.wake()
    return delivery


async def send_test(request: Request) -> Response:
    """Sends an event of the scope `ping`. A receiver answers it and does nothing else."""
    hub = hub_of(request)

    def act() -> OutboxDelivery:
        with hub.database.write() as connection:
            webhook = get_webhook(connection, request.path_params["id"])
            _check_enabled(webhook)
            id = hub.log.ping(connection, webhook, _subject(connection, hub, webhook))
            outbox.retry_now(connection, webhook)
            return get_delivery(connection, webhook.id, id)

    delivery = await run_in_threadpool(act)
    hub.log.wake()
    return JSONResponse({"delivery": as_json(delivery)})


def _check_enabled(webhook: StoredWebhook) -> None:
    if webhook.disabled:
        raise BadRequest(f"Webhook {webhook.id} is disabled and sends nothing: enable it first.")


def _subject(connection: Connection, hub: Hub, webhook: StoredWebhook) -> Repository:
    """A repository that the webhook watches, for the test event. If none exists yet, the returned
    `Repository` has the name of the first watched item, and is stored nowhere."""
    for repository in hub.repositories.all(connection):
        if any(item.covers(repository.name) for item in webhook.watched):
            return repository
    first = webhook.watched[0]
    owner, _, name = first.name.partition("/")
    type = first.type if first.type in ("dataset", "space") else "model"
    return Repository(
        id=secrets.token_hex(12),
        name=RepositoryName(type=type, owner=owner, name=name or "ping"),
        private=True,
        created_at=time.time(),
        folder=hub.repositories.incoming,
    )


def as_json(delivery: OutboxDelivery) -> dict[str, object]:
    times = ("created_at", "last_attempt_at")
    facts: dict[str, object] = asdict(delivery)
    # The fields of the first ref are also given at the top level, because most pushes move only one
    # ref.
    first = next(iter(delivery.updated_refs), None)
    facts |= {name: first and getattr(first, name) for name in ("ref", "old_sha", "new_sha")}
    for name in times:
        value = getattr(delivery, name)
        facts[name] = None if value is None else iso_time(value)
    return facts
