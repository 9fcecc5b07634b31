"""API routes that list deliveries, replay a delivery, or send a test event."""

import secrets
import time
from typing import Annotated

from fastapi import APIRouter, Depends, Query
from sqlalchemy import Connection

from pipeline.hub import outbox
from pipeline.hub.events import Event
from pipeline.hub.http_json import Json
from pipeline.hub.outbox import DeliveryStatus
from pipeline.hub.repositories import Repository, RepositoryName
from pipeline.hub.routes.access import person
from pipeline.hub.service import Hub, HubOf
from pipeline.hub.webhooks import (
    StoredWebhook,
    change_webhook,
    get_enabled_webhook,
    get_webhook,
)
from receiver.payload import PING

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
        return outbox.list_deliveries(connection, id, status=status, limit=limit)


@router.get("/deliveries/{delivery_id}")
def show(hub: HubOf, delivery_id: str) -> Json:
    with hub.database.read() as connection:
        return {"delivery": outbox.get_delivery(connection, delivery_id)}


@router.post("/deliveries/{delivery_id}/replay")
def replay(hub: HubOf, delivery_id: str, force: bool = False) -> Json:
    """Sends a delivery again, to the webhook's present URL. With `force`, the delivery gets a new
    id, so that the receiver handles it again."""
    with hub.database.write() as connection:
        delivery = outbox.replay(connection, delivery_id, force=force)
    return {"delivery": delivery}


@router.post("/webhooks/{id}/test")
def send_test(hub: HubOf, id: str) -> Json:
    """Sends an event of the scope `ping`. A receiver answers it and does nothing else."""
    with hub.database.write() as connection:
        webhook = get_enabled_webhook(connection, id)
        about = _subject(connection, hub, webhook)
        ping = Event(action="update", scope=PING)
        [sent] = hub.log.record(connection, about, ping, webhooks=[webhook])
        change_webhook(connection, webhook, retry_at=None)
        delivery = outbox.get_delivery(connection, sent)
    return {"delivery": delivery}


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
