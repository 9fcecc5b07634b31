"""Lists the deliveries for a person, and replays a delivery."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, Row, Select, select

from pipeline.hub.errors import WebhookNotFound
from pipeline.hub.repositories.refs import RefChange
from pipeline.hub.schema import deliveries as table
from pipeline.hub.schema import events
from pipeline.hub.webhooks import outbox
from pipeline.hub.webhooks.states import DeliveryStatus, move_deliveries


@dataclass(frozen=True, kw_only=True)
class OutboxDelivery:
    """One delivery as the API lists it. Times are in seconds since the epoch."""

    id: str
    webhook_id: str
    status: DeliveryStatus
    repository: str
    action: str
    scope: str
    updated_refs: tuple[RefChange, ...]
    created_at: float
    attempt: int
    last_attempt_at: float | None
    response_status: int | None
    response_head: str | None
    error: str | None
    milliseconds: float | None
    replay_of: str | None
    payload: str


def list_deliveries(
    connection: Connection, webhook_id: str | None, *, status: DeliveryStatus | None, limit: int
) -> Sequence[OutboxDelivery]:
    """At most `limit` deliveries, those of the newest events first. `webhook_id` None means every
    webhook, and `status` None means every state."""
    query = _activity()
    if webhook_id is not None:
        query = query.where(table.c.webhook_id == webhook_id)
    if status is not None:
        query = query.where(table.c.status == status)
    rows = connection.execute(
        query.order_by(table.c.event_seq.desc(), table.c.created_at.desc()).limit(limit)
    )
    return [_from_row(row) for row in rows]


def get_delivery(connection: Connection, webhook_id: str, delivery_id: str) -> OutboxDelivery:
    """Raises WebhookNotFound if the webhook has no delivery of this id."""
    row = connection.execute(
        _activity().where(table.c.id == delivery_id, table.c.webhook_id == webhook_id)
    ).one_or_none()
    if row is None:
        raise WebhookNotFound(
            f"Webhook {webhook_id!r} has no delivery {delivery_id!r}: list its deliveries with "
            f"`pipeline webhooks deliveries {webhook_id}`."
        )
    return _from_row(row)


def webhook_of(connection: Connection, delivery_id: str) -> str:
    """The id of the webhook that gets this delivery. Raises WebhookNotFound for an unknown id."""
    found = connection.scalar(select(table.c.webhook_id).where(table.c.id == delivery_id))
    if found is None:
        raise WebhookNotFound(
            f"There is no delivery {delivery_id!r} here: list the deliveries with "
            "`pipeline webhooks deliveries`."
        )
    return str(found)


def replay_delivery(
    connection: Connection, webhook_id: str, delivery_id: str, *, force: bool = False
) -> OutboxDelivery:
    """Puts a delivery into the queue again, counts its attempts from zero, and returns it.

    The delivery keeps its id. So a receiver that has already handled it only repeats its first
    answer. With `force`, this makes a new delivery with a new id, which the receiver handles again.
    The `replay_of` of the new delivery is the old id.
    """
    old = get_delivery(connection, webhook_id, delivery_id)
    if force:
        event_seq = select(table.c.event_seq).where(table.c.id == delivery_id).scalar_subquery()
        id = outbox.put(
            connection,
            webhook_id=webhook_id,
            event_seq=event_seq,
            payload=old.payload,
            replay_of=delivery_id,
        )
        return get_delivery(connection, webhook_id, id)
    move_deliveries(
        connection,
        "replayed",
        table.c.id == delivery_id,
        attempt=0,
        queued_at=time.time(),
    )
    return get_delivery(connection, webhook_id, delivery_id)


def _activity() -> Select[tuple[object, ...]]:
    return select(table, events).join(events, events.c.seq == table.c.event_seq)


def _from_row(row: Row[tuple[object, ...]]) -> OutboxDelivery:
    values = row._mapping
    return OutboxDelivery(
        id=values[table.c.id],
        webhook_id=values[table.c.webhook_id],
        status=values[table.c.status],
        repository=f"{values[events.c.type]}:{values[events.c.owner]}/{values[events.c.name]}",
        action=values[events.c.action],
        scope=values[events.c.scope],
        updated_refs=tuple(RefChange(**change) for change in values[events.c.updated_refs]),
        created_at=values[table.c.created_at],
        attempt=values[table.c.attempt],
        last_attempt_at=values[table.c.last_attempt_at],
        response_status=values[table.c.response_status],
        response_head=values[table.c.response_head],
        error=values[table.c.error],
        milliseconds=values[table.c.milliseconds],
        replay_of=values[table.c.replay_of],
        payload=values[table.c.payload],
    )
