"""The states of a webhook and of a delivery: every move, and the only code that makes one.

Each table says what may happen, in which states, and what it leads to. `docs/architecture.md` draws
both tables.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from sqlalchemy import Connection, update
from sqlalchemy.sql.elements import ColumnElement

from pipeline.hub.schema import deliveries, webhooks
from receiver.webhooks import WebhookStatus

DeliveryStatus = Literal["pending", "delivered", "dead"]
DeliveryEvent = Literal["queued", "taken", "failed", "given up", "heard again", "replayed"]
WebhookEvent = Literal["created", "failing", "answered", "changed", "enabled", "disabled", "gone"]
State = TypeVar("State", bound=str)


@dataclass(frozen=True, kw_only=True)
class Move(Generic[State]):
    sources: frozenset[State] = frozenset()
    """Empty for the first state of a new row."""
    target: State


DELIVERY_MOVES: Mapping[DeliveryEvent, Move[DeliveryStatus]] = {
    "queued": Move(target="pending"),
    "taken": Move(sources=frozenset({"pending", "dead"}), target="delivered"),
    "failed": Move(sources=frozenset({"pending"}), target="pending"),
    "given up": Move(sources=frozenset({"pending"}), target="dead"),
    "heard again": Move(sources=frozenset({"dead"}), target="pending"),
    "replayed": Move(sources=frozenset({"pending", "delivered", "dead"}), target="pending"),
}
"""A dead delivery is taken only as the probe of a suspended webhook, and heard again only if nobody
had listened to it. A probe that fails moves nothing."""

WEBHOOK_MOVES: Mapping[WebhookEvent, Move[WebhookStatus]] = {
    "created": Move(target="enabled"),
    "failing": Move(sources=frozenset({"enabled"}), target="suspended"),
    "answered": Move(sources=frozenset({"suspended"}), target="enabled"),
    "changed": Move(sources=frozenset({"suspended"}), target="enabled"),
    "enabled": Move(sources=frozenset({"disabled", "suspended"}), target="enabled"),
    "disabled": Move(sources=frozenset({"enabled", "suspended"}), target="disabled"),
    "gone": Move(sources=frozenset({"enabled", "suspended"}), target="disabled"),
}
"""What happens in a state that is not named leaves the webhook as it is: a new URL does not enable
a disabled webhook."""


def move_deliveries(
    connection: Connection, event: DeliveryEvent, *which: ColumnElement[bool], **values: object
) -> None:
    """Moves those deliveries of `which` that are in a state where this may happen."""
    move = DELIVERY_MOVES[event]
    may = deliveries.c.status.in_(move.sources)
    connection.execute(update(deliveries).where(*which, may).values(**values, status=move.target))


def move_webhook(
    connection: Connection, id: str, status: WebhookStatus, event: WebhookEvent
) -> None:
    """Moves the webhook if `status`, its state, is one where this may happen."""
    move = WEBHOOK_MOVES[event]
    if status in move.sources:
        connection.execute(
            update(webhooks).where(webhooks.c.id == id).values(webhook_columns(move.target))
        )


def webhook_columns(status: WebhookStatus) -> dict[str, object]:
    """The columns that hold the state. No webhook is both disabled and suspended."""
    return {
        "disabled": status == "disabled",
        "suspended_at": time.time() if status == "suspended" else None,
    }
