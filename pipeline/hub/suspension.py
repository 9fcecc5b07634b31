"""When a webhook is given a rest, and how it comes back. Changes rows only; sends nothing.

A webhook is suspended when several deliveries in a row fail, for some time: what it would be sent
waits and uses up no attempt. One delivery that fails again and again says nothing about the others:
it dies alone. Now and then the newest delivery that waits is sent all the same, a probe: the oldest
may be what the receiver fails at. The first probe that succeeds ends the suspension.
A receiver that asks for a pause, by `Retry-After`, gets it from all deliveries of the webhook.
"""

import time
from typing import Literal

from sqlalchemy import Connection, update

from pipeline.hub import outbox
from pipeline.hub.outbox import PENDING, Attempt
from pipeline.hub.schema import deliveries
from pipeline.hub.schema import webhooks as table
from pipeline.hub.settings import HubSettings
from pipeline.hub.states import DeliveryStatus, WebhookEvent, move_deliveries, move_webhook
from pipeline.hub.webhook_store import StoredWebhook

Turn = Literal["suspended", "resumed", "gone"]
GONE = 410
"""The receiver's way to say that it wants no more: https://www.standardwebhooks.com"""


def after_attempt(
    connection: Connection,
    webhook: StoredWebhook,
    attempt: Attempt,
    status: DeliveryStatus,
    settings: HubSettings,
) -> Turn | None:
    """Notes how an attempt ended; what that turned the webhook into, if anything."""
    if attempt.succeeded:
        if webhook.suspended_at is not None:
            resume(connection, webhook, "answered")
            return "resumed"
        if webhook.num_failures:
            _change(connection, webhook, num_failures=0, failing_since=None)
        return None
    if attempt.response_status == GONE:
        resume(connection, webhook, "gone")
        return "gone"
    if webhook.suspended_at is not None:
        _plan_probe(connection, webhook, attempt, webhook.num_probes + 1, settings)
        return None
    if attempt.refused and status == "pending":
        return None  # a receiver that is being started
    if attempt.retry_after_seconds:
        _hold_back(connection, webhook, time.time() + attempt.retry_after_seconds)
    failing_since = webhook.failing_since or attempt.started_at
    _change(connection, webhook, num_failures=webhook.num_failures + 1, failing_since=failing_since)
    if not attempt.refused and (
        attempt.started_at - failing_since < settings.suspend_after_seconds
        or outbox.num_failing(connection, webhook, failing_since) < settings.suspend_after_failures
    ):
        return None
    move_webhook(connection, webhook.id, webhook.status, "failing")
    _plan_probe(connection, webhook, attempt, 0, settings)
    return "suspended"


def resume(connection: Connection, webhook: StoredWebhook, event: WebhookEvent) -> None:
    """Ends what `event` ends, and forgets every failure: what waits is due now, and so is what
    nobody listened to."""
    now = time.time()
    if webhook.suspended_at is not None:
        move_deliveries(
            connection,
            "heard again",
            deliveries.c.webhook_id == webhook.id,
            outbox.died_unheard(webhook),
            queued_at=now,
        )
    connection.execute(
        update(deliveries)
        .where(deliveries.c.webhook_id == webhook.id, PENDING)
        .values(next_attempt_at=now)
    )
    move_webhook(connection, webhook.id, webhook.status, event)
    _change(connection, webhook, num_failures=0, failing_since=None, probe_at=None, num_probes=0)


def probe_now(connection: Connection, webhook: StoredWebhook) -> None:
    """Has a suspended webhook tried at once, because somebody asks for it."""
    if webhook.suspended_at is not None:
        _change(connection, webhook, probe_at=time.time())


def _hold_back(connection: Connection, webhook: StoredWebhook, until: float) -> None:
    """What waits, and what is still to come, goes no earlier; what somebody sends again does."""
    connection.execute(
        update(deliveries)
        .where(deliveries.c.webhook_id == webhook.id, PENDING, deliveries.c.next_attempt_at < until)
        .values(next_attempt_at=until)
    )
    _change(connection, webhook, probe_at=until)


def _plan_probe(
    connection: Connection,
    webhook: StoredWebhook,
    attempt: Attempt,
    num_probes: int,
    settings: HubSettings,
) -> None:
    wait = min(settings.probe_min_seconds * 2 ** min(num_probes, 60), settings.probe_max_seconds)
    wait = max(wait, attempt.retry_after_seconds or 0)
    _change(connection, webhook, num_probes=num_probes, probe_at=time.time() + wait)


def _change(connection: Connection, webhook: StoredWebhook, **values: object) -> None:
    connection.execute(update(table).where(table.c.id == webhook.id).values(values))
