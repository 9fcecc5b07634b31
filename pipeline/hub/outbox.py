"""Stores the deliveries, and finds the one to send next. `deliveries.py` sends them.

A delivery is `pending` until a 2xx answer makes it `delivered`, or the hub gives up and it is
`dead`. The database does not say which delivery is being sent. So if the hub is killed meanwhile,
the next hub sends the delivery again: a receiver gets each delivery at least once.
An attempt for a suspended webhook is a probe. If it fails, the state of the delivery and its number
of attempts do not change.
"""

import random
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import (
    Connection,
    Row,
    ScalarSelect,
    Select,
    and_,
    exists,
    func,
    insert,
    or_,
    select,
    text,
    update,
)
from sqlalchemy.sql.elements import ColumnElement

from pipeline.hub.errors import WebhookNotFound
from pipeline.hub.payloads import RefChange
from pipeline.hub.schema import deliveries as table
from pipeline.hub.schema import events, webhooks
from pipeline.hub.settings import HubSettings
from pipeline.hub.states import DELIVERY_MOVES, DeliveryEvent, DeliveryStatus, move_deliveries
from pipeline.hub.webhook_store import StoredWebhook

HEAD_CHARACTERS = 1000
"""How much of an answer is stored."""

# Without a bound value: SQLite uses the index `deliveries_pending` only for this exact condition.
PENDING = text("deliveries.status = 'pending'")


@dataclass(frozen=True, kw_only=True)
class Due:
    """The delivery that a webhook gets next, and when. Times are in seconds since the epoch."""

    id: str
    payload: str
    attempt: int
    """The number of attempts so far. Failed probes, and attempts whose connection was refused, do
    not count."""
    queued_at: float
    next_attempt_at: float
    replay_of: str | None = None
    is_probe: bool = False
    status: DeliveryStatus = "pending"
    """`dead` only for a probe."""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """How one attempt ended: with an answer (`response_status` and `response_head`) or with an
    `error`. The fields of the other kind are None."""

    started_at: float
    milliseconds: float
    response_status: int | None = None
    response_head: str | None = None
    retry_after_seconds: float | None = None
    error: str | None = None
    refused: bool = False
    """Whether the receiver is on this machine and does not listen. It may be starting."""

    @property
    def succeeded(self) -> bool:
        return self.response_status is not None and 200 <= self.response_status < 300


def webhooks_to_serve(connection: Connection) -> list[str]:
    """The ids of the webhooks that may have something to send now or later."""
    pending = exists().where(table.c.webhook_id == webhooks.c.id, PENDING)
    # A suspended webhook may have no pending delivery, and yet a dead one that can be a probe
    # (`died_unheard`).
    waiting = or_(pending, webhooks.c.suspended_at.is_not(None))
    rows = connection.execute(select(webhooks.c.id).where(webhooks.c.disabled.is_(False), waiting))
    return [row.id for row in rows]


def next_due(connection: Connection, webhook: StoredWebhook) -> Due | None:
    """The delivery that the webhook gets next, or None if there is none.

    Among the deliveries that are due now, this is the one of the oldest event. If none is due, it
    is the one that is due first. A suspended webhook gets its newest delivery as a probe. A
    disabled webhook gets None.
    """
    if webhook.disabled:
        return None
    of_webhook = select(table).where(table.c.webhook_id == webhook.id).limit(1)
    if webhook.suspended_at is not None:
        waiting = or_(table.c.status == "pending", died_unheard(webhook))
        row = connection.execute(
            of_webhook.where(waiting).order_by(table.c.event_seq.desc())
        ).one_or_none()
        return None if row is None else _due(row, probe_at=webhook.probe_at)
    pending = of_webhook.where(PENDING)
    due = pending.where(table.c.next_attempt_at <= time.time()).order_by(table.c.event_seq)
    row = connection.execute(due).one_or_none()
    if row is None:
        row = connection.execute(pending.order_by(table.c.next_attempt_at)).one_or_none()
    return None if row is None else _due(row)


def died_unheard(webhook: StoredWebhook) -> ColumnElement[bool]:
    """The condition for deliveries of a suspended webhook that died because their connections were
    refused: no receiver got them, and their number of attempts is 0.

    They are sent when the suspension ends. A delivery that died after its last attempt is not.
    """
    return and_(
        table.c.status == "dead",
        table.c.attempt == 0,
        table.c.last_attempt_at >= webhook.failing_since,
    )


def num_failing(connection: Connection, webhook: StoredWebhook, since: float) -> int:
    """The number of deliveries of the webhook that were tried at or after the time `since` and are
    not delivered."""
    failing = select(func.count()).where(
        table.c.webhook_id == webhook.id,
        table.c.last_attempt_at >= since,
        table.c.status != "delivered",
    )
    return connection.execute(failing).scalar_one()


def _due(row: Row[tuple[object, ...]], probe_at: float | None = None) -> Due:
    return Due(
        id=row.id,
        payload=row.payload,
        attempt=row.attempt,
        queued_at=row.queued_at,
        next_attempt_at=row.next_attempt_at if probe_at is None else probe_at,
        replay_of=row.replay_of,
        is_probe=probe_at is not None,
        status=row.status,
    )


def settle(
    connection: Connection, due: Due, attempt: Attempt, settings: HubSettings
) -> DeliveryStatus:
    """Stores how an attempt ended and plans the next one. Returns the state of the delivery."""
    # If the delivery was replayed during the attempt, it has another `queued_at` and starts over.
    # The end of this attempt then changes nothing.
    this = table.c.id == due.id, table.c.queued_at == due.queued_at
    ended: dict[str, object] = {
        "last_attempt_at": attempt.started_at,
        "response_status": attempt.response_status,
        "response_head": attempt.response_head,
        "error": attempt.error,
        "milliseconds": attempt.milliseconds,
    }
    if due.is_probe and not attempt.succeeded:
        connection.execute(update(table).where(*this).values(ended))
        return due.status
    made = due.attempt if attempt.refused else due.attempt + 1
    event, next_attempt_at = _plan(due, attempt, made, settings)
    if attempt.refused and event == "given up":
        made = 0  # `died_unheard` finds the delivery by this number
    move_deliveries(
        connection, event, *this, **ended, attempt=made, next_attempt_at=next_attempt_at
    )
    return DELIVERY_MOVES[event].target


def _plan(
    due: Due, attempt: Attempt, made: int, settings: HubSettings
) -> tuple[DeliveryEvent, float | None]:
    now = time.time()
    if attempt.succeeded:
        return "taken", None
    if attempt.refused:
        # A refused connection uses up no attempt, so the delivery dies only when it is too old.
        given_up = now - due.queued_at > settings.refused_give_up_seconds
        return ("given up", None) if given_up else ("failed", now)
    schedule = settings.delivery_schedule_seconds
    if made >= len(schedule):
        return "given up", None
    jitter = random.uniform(1 - settings.delivery_jitter, 1 + settings.delivery_jitter)
    wait = max(schedule[made] * jitter, attempt.retry_after_seconds or 0)
    return "failed", now + wait


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
    next_attempt_at: float | None
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
    return [_record(row) for row in rows]


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
    return _record(row)


def webhook_of(connection: Connection, delivery_id: str) -> str:
    """The id of the webhook that gets this delivery. Raises WebhookNotFound for an unknown id."""
    found = connection.scalar(select(table.c.webhook_id).where(table.c.id == delivery_id))
    if found is None:
        raise WebhookNotFound(
            f"There is no delivery {delivery_id!r} here: list the deliveries with "
            "`pipeline webhooks deliveries`."
        )
    return str(found)


def replay(
    connection: Connection, webhook_id: str, delivery_id: str, *, force: bool = False
) -> OutboxDelivery:
    """Makes a delivery due again, with no attempt counted, and returns it.

    It keeps its id, so a receiver that has done the work answers with its first answer. With
    `force`, a new delivery is made whose `replay_of` is the old id: the receiver works again.
    """
    old = get_delivery(connection, webhook_id, delivery_id)
    now = time.time()
    if force:
        event_seq = select(table.c.event_seq).where(table.c.id == delivery_id).scalar_subquery()
        id = put(
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
        queued_at=now,
        next_attempt_at=now,
    )
    return get_delivery(connection, webhook_id, delivery_id)


def put(
    connection: Connection,
    *,
    webhook_id: str,
    event_seq: int | ScalarSelect[int],
    payload: str,
    replay_of: str | None = None,
    not_before: float = 0,
) -> str:
    """Adds a delivery and returns its id. It is due now, or at `not_before` (seconds since the
    epoch) if that is later."""
    id, now = str(uuid.uuid4()), time.time()
    connection.execute(
        insert(table).values(
            id=id,
            webhook_id=webhook_id,
            event_seq=event_seq,
            payload=payload,
            status=DELIVERY_MOVES["queued"].target,
            attempt=0,
            created_at=now,
            queued_at=now,
            next_attempt_at=max(now, not_before),
            replay_of=replay_of,
        )
    )
    return id


def _activity() -> Select[tuple[object, ...]]:
    return select(table, events).join(events, events.c.seq == table.c.event_seq)


def _record(row: Row[tuple[object, ...]]) -> OutboxDelivery:
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
        next_attempt_at=values[table.c.next_attempt_at],
        last_attempt_at=values[table.c.last_attempt_at],
        response_status=values[table.c.response_status],
        response_head=values[table.c.response_head],
        error=values[table.c.error],
        milliseconds=values[table.c.milliseconds],
        replay_of=values[table.c.replay_of],
        payload=values[table.c.payload],
    )
