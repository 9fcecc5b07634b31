"""Stores the deliveries, finds the one to send next, and removes old ones. `deliveries.py` sends
them.

A delivery is `pending` until a 2xx answer makes it `delivered`, or until the hub gives up and makes
it `dead`. The database does not say which delivery is being sent. So if the hub is killed during an
attempt, it sends the delivery again after its restart. A receiver gets each delivery at least once.

An attempt for a suspended webhook is a probe. If a probe fails, the state of the delivery and its
number of attempts do not change.
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
    and_,
    delete,
    exists,
    func,
    insert,
    or_,
    select,
    text,
    update,
)
from sqlalchemy.sql.elements import ColumnElement

from pipeline.hub.database import Database
from pipeline.hub.schema import deliveries as table
from pipeline.hub.schema import events, webhooks
from pipeline.hub.settings import HubSettings
from pipeline.hub.webhooks.states import (
    DELIVERY_MOVES,
    DeliveryEvent,
    DeliveryStatus,
    move_deliveries,
)
from pipeline.hub.webhooks.store import StoredWebhook

HEAD_CHARACTERS = 1000
"""How many characters of a receiver's answer are stored."""
PRUNE_BATCH = 200
"""How many rows one transaction removes."""

# This has no bound value, because SQLite uses the index `deliveries_pending` only for exactly this
# condition.
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


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """How one attempt ended. With an answer, `response_status` and `response_head` are set;
    otherwise `error` is set."""

    started_at: float
    milliseconds: float
    response_status: int | None = None
    response_head: str | None = None
    retry_after_seconds: float | None = None
    error: str | None = None
    refused: bool = False
    """Whether the receiver is on this machine and refused the connection. It may be starting."""

    @property
    def succeeded(self) -> bool:
        return self.response_status is not None and 200 <= self.response_status < 300


def webhooks_to_serve(connection: Connection) -> list[str]:
    """The ids of the webhooks that may have a delivery to send, now or later."""
    pending = exists().where(table.c.webhook_id == webhooks.c.id, PENDING)
    # A suspended webhook without a pending delivery may still have a dead one that can be its probe
    # (`died_unheard`).
    waiting = or_(pending, webhooks.c.suspended_at.is_not(None))
    rows = connection.execute(select(webhooks.c.id).where(webhooks.c.disabled.is_(False), waiting))
    return [row.id for row in rows]


def next_due(connection: Connection, webhook: StoredWebhook) -> Due | None:
    """The delivery that the webhook gets next, or None if there is none.

    If several deliveries are due now, this is the one of the oldest event. If none is due, this is
    the one that is due next. A suspended webhook gets one delivery after the other as a probe:
    first the newest that was never tried, then the one whose last attempt is the oldest. So if the
    receiver always fails at one delivery, this delivery does not hold up the others. For a
    disabled webhook, this is None.
    """
    if webhook.disabled:
        return None
    of_webhook = select(table).where(table.c.webhook_id == webhook.id).limit(1)
    if webhook.suspended_at is not None:
        waiting = or_(table.c.status == "pending", died_unheard(webhook))
        order = (table.c.last_attempt_at.nulls_first(), table.c.event_seq.desc())
        row = connection.execute(of_webhook.where(waiting).order_by(*order)).one_or_none()
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

    The hub sends them when the suspension ends. It does not send a delivery that died after its
    last attempt.
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
    )


def settle(
    connection: Connection, due: Due, attempt: Attempt, settings: HubSettings
) -> DeliveryStatus:
    """Stores how an attempt ended and plans the next one. Returns the state of the delivery: `dead`
    if it was deleted with its webhook during the attempt, because it is not sent again."""
    # If a person replayed the delivery during the attempt, it has another `queued_at` and starts
    # from the beginning. Then the end of this attempt does not change the delivery.
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
    else:
        made = due.attempt if attempt.refused else due.attempt + 1
        event, next_attempt_at = _plan(due, attempt, made, settings)
        if attempt.refused and event == "given up":
            made = 0  # `died_unheard` finds the delivery by this number
        move_deliveries(
            connection, event, *this, **ended, attempt=made, next_attempt_at=next_attempt_at
        )
    stored: DeliveryStatus | None = connection.scalar(
        select(table.c.status).where(table.c.id == due.id)
    )
    return stored or "dead"


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


def prune(database: Database, *, keep_days: float) -> None:
    """Removes deliveries that became delivered or dead more than `keep_days` days ago. Then removes
    events that are older than this and have no delivery. Reads the old rows without a lock and
    deletes a few at a time, so that no push waits long.

    Keeps the dead deliveries of a suspended webhook, because the hub sends some of them when the
    suspension ends.
    """
    before = time.time() - 86400 * keep_days
    _remove(database, table.c.id, _is_over(before))
    told = exists().where(table.c.event_seq == events.c.seq)
    _remove(database, events.c.seq, and_(events.c.created_at < before, ~told))


def _is_over(before: float) -> ColumnElement[bool]:
    suspended = select(webhooks.c.id).where(webhooks.c.suspended_at.is_not(None))
    return and_(
        table.c.last_attempt_at < before,
        table.c.created_at < before,
        table.c.queued_at < before,
        or_(
            table.c.status == "delivered",
            and_(table.c.status == "dead", table.c.webhook_id.not_in(suspended)),
        ),
    )


def _remove(database: Database, key: ColumnElement[object], is_over: ColumnElement[bool]) -> None:
    with database.read() as connection:
        keys: Sequence[object] = connection.scalars(select(key).where(is_over)).all()
    for first in range(0, len(keys), PRUNE_BATCH):
        # Check the condition again, because a person may have replayed a delivery after the read.
        # A power cut may undo this relaxed write. The next call then removes the rows again.
        with database.write_relaxed() as connection:
            batch = key.in_(keys[first : first + PRUNE_BATCH])
            connection.execute(delete(key.table).where(batch, is_over))
