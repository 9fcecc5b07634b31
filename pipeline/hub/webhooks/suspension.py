"""Decides when a webhook is suspended, and when the suspension ends. This module only changes rows
of the database; `deliveries.py` sends the deliveries.

A webhook is suspended when several different deliveries have failed and none has succeeded for some
time. The webhook's deliveries then wait and use up no attempt. If only one delivery fails again and
again, there is no suspension: this delivery dies, and the others are sent as usual. There is one
exception: if a delivery dies because connections were refused, the webhook is suspended at once.

From time to time the hub sends one delivery of a suspended webhook as a probe. The probes take
turns (`outbox.next_due`), because the receiver might always fail at one of the deliveries. The
first probe that succeeds ends the suspension.

If the answer to a failed attempt has the header `Retry-After`, all deliveries of the webhook wait
that long.
"""

import time
from typing import Literal

from sqlalchemy import Connection, update

from pipeline.hub.schema import deliveries
from pipeline.hub.schema import webhooks as table
from pipeline.hub.settings import HubSettings
from pipeline.hub.webhooks import outbox
from pipeline.hub.webhooks.outbox import PENDING, Attempt
from pipeline.hub.webhooks.states import DeliveryStatus, WebhookEvent, move_deliveries, move_webhook
from pipeline.hub.webhooks.store import StoredWebhook

StatusChange = Literal["suspended", "resumed", "gone"]
GONE = 410
"""With this status, a receiver says that it wants no more deliveries:
https://www.standardwebhooks.com"""


def after_attempt(
    connection: Connection,
    webhook: StoredWebhook,
    attempt: Attempt,
    status: DeliveryStatus,
    settings: HubSettings,
) -> StatusChange | None:
    """Updates the webhook's row after an attempt: its failures, its next probe and its state.
    Returns the change of the state, or None if the state stays the same."""
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
        return None  # the receiver is probably starting
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
    """Moves the webhook to the state that follows `event`, and forgets its failures. The pending
    deliveries of the webhook are due now. If it was suspended, the deliveries that died because
    connections were refused become pending, and are due now too."""
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
    """Makes the next probe of a suspended webhook due now, because a person replays a delivery or
    sends a test."""
    if webhook.suspended_at is not None:
        _change(connection, webhook, probe_at=time.time())


def _hold_back(connection: Connection, webhook: StoredWebhook, until: float) -> None:
    """Makes the webhook's pending deliveries, and new ones, wait until the time `until`. A delivery
    that a person replays before this time is sent at once."""
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
