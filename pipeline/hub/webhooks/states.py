"""The states of webhooks and deliveries, and the events that move them from one state to another.
No other module changes a state. (In this module, an event is something that happens to a webhook or
a delivery. Elsewhere in the hub, an event is a change of a repository.)

Each table says in which states an event has an effect, and which state follows.
`docs/architecture.md` draws both tables.
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
DeliveryEvent = Literal["queued", "taken", "failed", "given up", "replayed"]
WebhookEvent = Literal["created", "failing", "answered", "changed", "enabled", "disabled", "gone"]
State = TypeVar("State", bound=str)


@dataclass(frozen=True, kw_only=True)
class Move(Generic[State]):
    sources: frozenset[State] = frozenset()
    """The states in which the event has an effect. Empty for the event that makes a new row."""
    target: State


DELIVERY_MOVES: Mapping[DeliveryEvent, Move[DeliveryStatus]] = {
    "queued": Move(target="pending"),
    "taken": Move(sources=frozenset({"pending"}), target="delivered"),
    "failed": Move(sources=frozenset({"pending"}), target="pending"),
    "given up": Move(sources=frozenset({"pending"}), target="dead"),
    "replayed": Move(sources=frozenset({"pending", "delivered", "dead"}), target="pending"),
}

WEBHOOK_MOVES: Mapping[WebhookEvent, Move[WebhookStatus]] = {
    "created": Move(target="enabled"),
    "failing": Move(sources=frozenset({"enabled"}), target="suspended"),
    "answered": Move(sources=frozenset({"suspended"}), target="enabled"),
    "changed": Move(sources=frozenset({"suspended"}), target="enabled"),
    "enabled": Move(sources=frozenset({"disabled", "suspended"}), target="enabled"),
    "disabled": Move(sources=frozenset({"enabled", "suspended"}), target="disabled"),
    "gone": Move(sources=frozenset({"enabled", "suspended"}), target="disabled"),
}
"""An event in a state that is not among its sources changes nothing. For example, a new URL
("changed") does not enable a disabled webhook."""


def move_deliveries(
    connection: Connection, event: DeliveryEvent, *which: ColumnElement[bool], **values: object
) -> None:
    """Moves the deliveries that meet the conditions `which` and are in a source state of `event`.
    Sets the columns `values` in the same rows."""
    move = DELIVERY_MOVES[event]
    may = deliveries.c.status.in_(move.sources)
    connection.execute(update(deliveries).where(*which, may).values(**values, status=move.target))


def move_webhook(
    connection: Connection, id: str, status: WebhookStatus, event: WebhookEvent
) -> None:
    """Moves the webhook if `status`, its present state, is a source state of `event`."""
    move = WEBHOOK_MOVES[event]
    if status in move.sources:
        connection.execute(
            update(webhooks).where(webhooks.c.id == id).values(webhook_columns(move.target))
        )


def webhook_columns(status: WebhookStatus) -> dict[str, object]:
    """The values of the two columns that hold the state. A webhook is never both disabled and
    suspended."""
    return {
        "disabled": status == "disabled",
        "suspended_at": time.time() if status == "suspended" else None,
    }
