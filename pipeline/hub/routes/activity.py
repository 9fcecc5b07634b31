"""API routes that list deliveries, replay a delivery, or send a test event."""

import secrets
import time
from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Depends, Query
from sqlalchemy import Connection

from pipeline.hub.errors import BadRequest
from pipeline.hub.http_json import Json, iso_time
from pipeline.hub.repositories.names import RepositoryName
from pipeline.hub.repositories.store import Repository
from pipeline.hub.routes.access import person
from pipeline.hub.service import Hub, HubOf
from pipeline.hub.webhooks import outbox
from pipeline.hub.webhooks.activity import (
    OutboxDelivery,
    get_delivery,
    list_deliveries,
    replay_delivery,
)
from pipeline.hub.webhooks.outbox import DeliveryStatus
from pipeline.hub.webhooks.store import StoredWebhook, get_webhook

router = APIRouter(prefix="/api/settings", dependencies=[Depends(person)])


@router.get("/deliveries")
@router.get("/webhooks/{id}/deliveries")
def show_all(
    hub: HubOf,
    id: str | None = None,
    status: DeliveryStatus | None = None,
    limit: Annotated[int, Query(ge=0, le=1000)] = 100,
) -> list[Json]:
    """The deliveries of one webhook, or of all, newest first."""
    with hub.database.read() as connection:
        if id is not None:
            get_webhook(connection, id)
        found = list_deliveries(connection, id, status=status, limit=limit)
        return [as_json(delivery) for delivery in found]


@router.get("/deliveries/{delivery_id}")
def show(hub: HubOf, delivery_id: str) -> Json:
    with hub.database.read() as connection:
        return {"delivery": as_json(get_delivery(connection, None, delivery_id))}


@router.post("/deliveries/{delivery_id}/replay")
def replay(hub: HubOf, delivery_id: str, force: bool = False) -> Json:
    """Sends a delivery again, to the webhook's present URL. With `force`, the delivery gets a new
    id, so that the receiver handles it again."""
    return {"delivery": as_json(send_again(hub, delivery_id, force=force))}


def send_again(hub: Hub, delivery_id: str, *, force: bool) -> OutboxDelivery:
    """Raises NotFound, and BadRequest if the webhook is disabled."""
    with hub.database.write() as connection:
        webhook = get_webhook(connection, get_delivery(connection, None, delivery_id).webhook_id)
        _check_enabled(webhook)
        delivery = replay_delivery(connection, webhook.id, delivery_id, force=force)
        outbox.retry_now(connection, webhook)
    hub.log.wake()
    return delivery


@router.post("/webhooks/{id}/test")
def send_test(hub: HubOf, id: str) -> Json:
    """Sends an event of the scope `ping`. A receiver answers it and does nothing else."""
    with hub.database.write() as connection:
        webhook = get_webhook(connection, id)
        _check_enabled(webhook)
        sent = hub.log.ping(connection, webhook, _subject(connection, hub, webhook))
        outbox.retry_now(connection, webhook)
        delivery = get_delivery(connection, id, sent)
    hub.log.wake()
    return {"delivery": as_json(delivery)}


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


def as_json(delivery: OutboxDelivery) -> Json:
    times = ("created_at", "last_attempt_at")
    facts: Json = asdict(delivery)
    # The fields of the first ref are also given at the top level, because most pushes move only one
    # ref.
    first = next(iter(delivery.updated_refs), None)
    facts |= {name: first and getattr(first, name) for name in ("ref", "old_sha", "new_sha")}
    for name in times:
        value = getattr(delivery, name)
        facts[name] = None if value is None else iso_time(value)
    return facts
