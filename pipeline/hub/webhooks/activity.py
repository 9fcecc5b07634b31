"""Lists the deliveries for a person, and replays a delivery."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, select, update

from pipeline.hub.errors import NotFound
from pipeline.hub.repositories.refs import RefChange
from pipeline.hub.schema import deliveries as table
from pipeline.hub.schema import events
from pipeline.hub.webhooks import outbox
from pipeline.hub.webhooks.outbox import DeliveryStatus


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


_ACTIVITY = select(
    *(column for column in table.c if column.name not in ("event_seq", "queued_at")),
    events.c.action,
    events.c.scope,
    events.c.updated_refs,
    (events.c.type + ":" + events.c.owner + "/" + events.c.name).label("repository"),
).join(events, events.c.seq == table.c.event_seq)


def list_deliveries(
    connection: Connection, webhook_id: str | None, *, status: DeliveryStatus | None, limit: int
) -> Sequence[OutboxDelivery]:
    """At most `limit` deliveries, those of the newest events first. `webhook_id` None means every
    webhook, and `status` None means every state."""
    query = _ACTIVITY
    if webhook_id is not None:
        query = query.where(table.c.webhook_id == webhook_id)
    if status is not None:
        query = query.where(table.c.status == status)
    rows = connection.execute(
        query.order_by(table.c.event_seq.desc(), table.c.created_at.desc()).limit(limit)
    )
    return [_from_row(row) for row in rows]


def get_delivery(
    connection: Connection, webhook_id: str | None, delivery_id: str
) -> OutboxDelivery:
    """Raises NotFound if the webhook, or any webhook if `webhook_id` is None, has no
    delivery of this id."""
    query = _ACTIVITY.where(table.c.id == delivery_id)
    if webhook_id is not None:
        query = query.where(table.c.webhook_id == webhook_id)
    row = connection.execute(query).one_or_none()
    if row is None:
        raise NotFound(
            f"There is no delivery {delivery_id!r}: list the deliveries with "
            f"`pipeline webhooks deliveries{' ' + webhook_id if webhook_id else ''}`."
        )
    return _from_row(row)


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
    again = {"status": "pending", "attempt": 0, "queued_at": time.time()}
    connection.execute(update(table).where(table.c.id == delivery_id).values(again))
    return get_delivery(connection, webhook_id, delivery_id)


def _from_row(row: Any) -> OutboxDelivery:
    changes = tuple(RefChange(**change) for change in row.updated_refs)
    return OutboxDelivery(**row._asdict() | {"updated_refs": changes})
