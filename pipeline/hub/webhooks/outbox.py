"""Stores the deliveries: one queue for each webhook, the oldest event first. `deliveries.py` sends
them.

A delivery is `pending` until a 2xx answer makes it `delivered`, or until its last attempt has
failed, which makes it `dead`. Only the head of a queue is sent: its event is the oldest that is
pending. While the head waits for its next attempt, all later deliveries wait too, so a receiver
sees the events in their order.

If a webhook's receiver has failed for some time, the webhook is `suspended`. This is only what
people are told: the head is tried as before, and its first success ends the suspension.

The database does not say which delivery is being sent. So if the hub is killed during an attempt,
it sends the delivery again after its restart. A receiver gets each delivery at least once.
"""

import random
import time
import uuid
from dataclasses import dataclass
from typing import Literal

from sqlalchemy import Connection, ScalarSelect, and_, delete, exists, insert, select, text, update

from pipeline.hub.database import Database
from pipeline.hub.schema import deliveries as table
from pipeline.hub.schema import events, webhooks
from pipeline.hub.settings import HubSettings
from pipeline.hub.webhooks.store import StoredWebhook, change_webhook, find_webhook

HEAD_CHARACTERS = 1000
"""How many characters of a receiver's answer are stored."""

# This has no bound value, because SQLite uses the index `deliveries_pending` only for exactly this
# condition.
PENDING = text("deliveries.status = 'pending'")


@dataclass(frozen=True, kw_only=True)
class Due:
    """The head of a webhook's queue, and when it is sent. Times are in seconds since the epoch."""

    id: str
    payload: str
    attempt: int
    """The number of attempts so far. Attempts whose connection was refused do not count."""
    queued_at: float
    next_attempt_at: float
    replay_of: str | None = None


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


DeliveryStatus = Literal["pending", "delivered", "dead"]
StatusChange = Literal["failing", "answered", "gone"]

GONE = 410
"""With this status, a receiver says that it wants no more deliveries:
https://www.standardwebhooks.com"""


def webhooks_to_serve(connection: Connection) -> list[str]:
    """The ids of the webhooks that have a delivery to send, now or later."""
    pending = exists().where(table.c.webhook_id == webhooks.c.id, PENDING)
    rows = connection.execute(select(webhooks.c.id).where(webhooks.c.disabled.is_(False), pending))
    return [row.id for row in rows]


def head(connection: Connection, webhook: StoredWebhook) -> Due | None:
    """The head of the webhook's queue. None if the queue is empty or the webhook is disabled."""
    if webhook.disabled:
        return None
    queue = select(table).where(table.c.webhook_id == webhook.id, PENDING)
    first = queue.order_by(table.c.event_seq, table.c.created_at).limit(1)
    row = connection.execute(first).one_or_none()
    if row is None:
        return None
    return Due(
        id=row.id,
        payload=row.payload,
        attempt=row.attempt,
        queued_at=row.queued_at,
        next_attempt_at=webhook.retry_at or 0,
        replay_of=row.replay_of,
    )


def settle(
    connection: Connection,
    due: Due,
    webhook: StoredWebhook,
    attempt: Attempt,
    settings: HubSettings,
) -> tuple[DeliveryStatus, StatusChange | None]:
    """Stores how an attempt ended, and plans the next one. `webhook` is the webhook as it was
    before the attempt.

    Returns the state of the delivery (`dead` if it was deleted with its webhook during the attempt,
    because it is not sent again), and what the attempt has changed in the state of the webhook.
    """
    made = due.attempt + (not attempt.refused)
    is_last = not attempt.refused and made >= len(settings.delivery_schedule_seconds)
    status: DeliveryStatus = "pending"
    if attempt.succeeded:
        status = "delivered"
    elif is_last and attempt.response_status != GONE:
        status = "dead"
    # If a person replayed the delivery during the attempt, it has another `queued_at` and starts
    # from the beginning. Then the end of this attempt does not change the delivery.
    connection.execute(
        update(table)
        .where(table.c.id == due.id, table.c.queued_at == due.queued_at)
        .values(
            status=status,
            attempt=made,
            last_attempt_at=attempt.started_at,
            response_status=attempt.response_status,
            response_head=attempt.response_head,
            error=attempt.error,
            milliseconds=attempt.milliseconds,
        )
    )
    stored: DeliveryStatus = connection.scalar(
        select(table.c.status).where(table.c.id == due.id)
    ) or ("dead")
    current = find_webhook(connection, webhook.id)
    # If a person enabled the webhook, changed its URL or replayed a delivery during the attempt, a
    # failure of this attempt says nothing about the webhook in its present state.
    if current is None or not (attempt.succeeded or current.stands_as(webhook)):
        return stored, None
    if attempt.succeeded:
        restart(connection, current)
        return stored, "answered" if current.suspended_at is not None else None
    if attempt.response_status == GONE:
        restart(connection, current, disabled=True)
        return stored, "gone"
    since = current.failing_since or attempt.started_at
    wait = _wait_seconds(attempt, made, attempt.started_at - since, is_last, settings)
    change_webhook(connection, current, failing_since=since, retry_at=time.time() + wait)
    is_due = attempt.started_at - since >= settings.suspend_after_seconds
    if not is_due or current.suspended_at is not None:
        return stored, None
    change_webhook(connection, current, suspended_at=time.time())
    return stored, "failing"


def _wait_seconds(
    attempt: Attempt, made: int, failing_seconds: float, is_last: bool, settings: HubSettings
) -> float:
    """How long the queue waits after a failed attempt. After the last attempt of the head, the next
    delivery follows at once."""
    if attempt.refused:
        # The receiver is probably starting. Wait as long as it has refused, so the wait doubles.
        shortest, longest = settings.refused_min_seconds, settings.refused_max_seconds
        return min(max(failing_seconds, shortest), longest)
    asked = attempt.retry_after_seconds or 0
    if is_last:
        return asked
    jitter = random.uniform(1 - settings.delivery_jitter, 1 + settings.delivery_jitter)
    return max(settings.delivery_schedule_seconds[made] * jitter, asked)


def restart(
    connection: Connection, webhook: StoredWebhook, *, disabled: bool | None = None
) -> None:
    """Forgets the failures of the webhook, so that it is not suspended, and the head of its queue
    is due now. Also disables or enables it, unless `disabled` is None."""
    changed = webhook.disabled if disabled is None else disabled
    change_webhook(
        connection,
        webhook,
        disabled=changed,
        failing_since=None,
        suspended_at=None,
        retry_at=None,
    )


def retry_now(connection: Connection, webhook: StoredWebhook) -> None:
    """Makes the head due now, because a person replays a delivery or sends a test."""
    change_webhook(connection, webhook, retry_at=None)


def put(
    connection: Connection,
    *,
    webhook_id: str,
    event_seq: int | ScalarSelect[int],
    payload: str,
    replay_of: str | None = None,
) -> str:
    """Adds a delivery to the webhook's queue, and returns its id."""
    id, now = str(uuid.uuid4()), time.time()
    connection.execute(
        insert(table).values(
            id=id,
            webhook_id=webhook_id,
            event_seq=event_seq,
            payload=payload,
            status="pending",
            attempt=0,
            created_at=now,
            queued_at=now,
            replay_of=replay_of,
        )
    )
    return id


def prune(database: Database, *, keep_days: float) -> None:
    """Removes deliveries that became delivered or dead more than `keep_days` days ago, and events
    that are older than this and have no delivery. A power cut may undo this relaxed write; the next
    call then removes the rows again."""
    before = time.time() - 86400 * keep_days
    is_over = and_(
        table.c.last_attempt_at < before,
        table.c.created_at < before,
        table.c.queued_at < before,
        table.c.status != "pending",
    )
    told = exists().where(table.c.event_seq == events.c.seq)
    with database.write_relaxed() as connection:
        connection.execute(delete(table).where(is_over))
        connection.execute(delete(events).where(events.c.created_at < before, ~told))
