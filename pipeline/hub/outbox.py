"""The deliveries on disk: what is due, how attempts ended, what a webhook was sent. Sends nothing.

A delivery is `pending` from the event on until a 2xx answer (`delivered`) or its last attempt
(`dead`). Nothing marks one as being sent, so a killed hub sends it again: at least once.
"""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sqlalchemy import Connection, Row, Select, exists, select, text, update

from pipeline.hub.errors import WebhookNotFound
from pipeline.hub.schema import deliveries as table
from pipeline.hub.schema import events, webhooks
from pipeline.hub.settings import HubSettings

DeliveryStatus = Literal["pending", "delivered", "dead"]
HEAD_CHARACTERS = 1000

# Literal, as in the partial index: SQLite cannot match an index with a bound value.
_PENDING = text("deliveries.status = 'pending'")


@dataclass(frozen=True, kw_only=True)
class Due:
    """The delivery that a webhook gets next, and when."""

    id: str
    payload: str
    attempt: int
    """Attempts that were made."""
    queued_at: float
    next_attempt_at: float


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """How one attempt ended: with an answer, or with an error."""

    started_at: float
    milliseconds: float
    response_status: int | None = None
    response_head: str | None = None
    retry_after_seconds: float | None = None
    error: str | None = None
    refused: bool = False
    """A loopback receiver that does not listen (yet)."""

    @property
    def succeeded(self) -> bool:
        return self.response_status is not None and 200 <= self.response_status < 300


def webhooks_with_pending(connection: Connection) -> list[str]:
    pending = exists().where(table.c.webhook_id == webhooks.c.id, _PENDING)
    rows = connection.execute(select(webhooks.c.id).where(webhooks.c.disabled.is_(False), pending))
    return [row.id for row in rows]


def next_due(connection: Connection, webhook_id: str) -> Due | None:
    """Of what is due now the oldest event's, else what is due soonest; None for nothing pending."""
    pending = (
        select(table)
        .join(webhooks, webhooks.c.id == table.c.webhook_id)
        .where(table.c.webhook_id == webhook_id, _PENDING, webhooks.c.disabled.is_(False))
        .limit(1)
    )
    due = pending.where(table.c.next_attempt_at <= time.time()).order_by(table.c.event_seq)
    row = connection.execute(due).one_or_none()
    if row is None:
        row = connection.execute(pending.order_by(table.c.next_attempt_at)).one_or_none()
    if row is None:
        return None
    return Due(
        id=row.id,
        payload=row.payload,
        attempt=row.attempt,
        queued_at=row.queued_at,
        next_attempt_at=row.next_attempt_at,
    )


def settle(
    connection: Connection, due: Due, attempt: Attempt, settings: HubSettings
) -> DeliveryStatus:
    """Stores how an attempt ended and plans the next one."""
    made = due.attempt if attempt.refused else due.attempt + 1
    status, next_attempt_at = _plan(due, attempt, made, settings)
    connection.execute(
        update(table)
        # A replay while it was under way starts over; its end is not this attempt's to decide.
        .where(table.c.id == due.id, table.c.queued_at == due.queued_at)
        .values(
            status=status,
            attempt=made,
            next_attempt_at=next_attempt_at,
            last_attempt_at=attempt.started_at,
            response_status=attempt.response_status,
            response_head=attempt.response_head,
            error=attempt.error,
            milliseconds=attempt.milliseconds,
        )
    )
    return status


def _plan(
    due: Due, attempt: Attempt, made: int, settings: HubSettings
) -> tuple[DeliveryStatus, float | None]:
    now = time.time()
    if attempt.succeeded:
        return "delivered", None
    if attempt.refused:
        # Costs nothing and says nothing about the receiver, so only age ends it.
        given_up = now - due.queued_at > settings.refused_give_up_seconds
        return ("dead", None) if given_up else ("pending", now)
    schedule = settings.delivery_schedule_seconds
    if made >= len(schedule):
        return "dead", None
    jitter = random.uniform(1 - settings.delivery_jitter, 1 + settings.delivery_jitter)
    wait = max(schedule[made] * jitter, attempt.retry_after_seconds or 0)
    return "pending", now + wait


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """One line of a webhook's activity."""

    id: str
    webhook_id: str
    status: DeliveryStatus
    repository: str
    action: str
    scope: str
    ref: str | None
    old_sha: str | None
    new_sha: str | None
    created_at: float
    attempt: int
    next_attempt_at: float | None
    last_attempt_at: float | None
    response_status: int | None
    response_head: str | None
    error: str | None
    milliseconds: float | None
    payload: str


def list_deliveries(
    connection: Connection, webhook_id: str, *, status: DeliveryStatus | None, limit: int
) -> Sequence[Delivery]:
    """The newest events' first."""
    query = _activity().where(table.c.webhook_id == webhook_id)
    if status is not None:
        query = query.where(table.c.status == status)
    rows = connection.execute(query.order_by(table.c.event_seq.desc()).limit(limit))
    return [_record(row) for row in rows]


def replay(connection: Connection, webhook_id: str, delivery_id: str) -> Delivery:
    """Puts a delivery in line again under its old id, with the whole schedule before it."""
    now = time.time()
    connection.execute(
        update(table)
        .where(table.c.id == delivery_id, table.c.webhook_id == webhook_id)
        .values(status="pending", attempt=0, queued_at=now, next_attempt_at=now)
    )
    row = connection.execute(
        _activity().where(table.c.id == delivery_id, table.c.webhook_id == webhook_id)
    ).one_or_none()
    if row is None:
        raise WebhookNotFound(f"Webhook {webhook_id!r} has no delivery {delivery_id!r}.")
    return _record(row)


def _activity() -> Select[tuple[object, ...]]:
    return select(table, events).join(events, events.c.seq == table.c.event_seq)


def _record(row: Row[tuple[object, ...]]) -> Delivery:
    values = row._mapping
    return Delivery(
        id=values[table.c.id],
        webhook_id=values[table.c.webhook_id],
        status=values[table.c.status],
        repository=f"{values[events.c.type]}:{values[events.c.owner]}/{values[events.c.name]}",
        action=values[events.c.action],
        scope=values[events.c.scope],
        ref=values[events.c.ref],
        old_sha=values[events.c.old_sha],
        new_sha=values[events.c.new_sha],
        created_at=values[table.c.created_at],
        attempt=values[table.c.attempt],
        next_attempt_at=values[table.c.next_attempt_at],
        last_attempt_at=values[table.c.last_attempt_at],
        response_status=values[table.c.response_status],
        response_head=values[table.c.response_head],
        error=values[table.c.error],
        milliseconds=values[table.c.milliseconds],
        payload=values[table.c.payload],
    )
