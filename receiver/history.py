"""Keeps the latest requests to the handlers in memory, without the bodies of the requests. The
landing page shows these requests."""

from collections import deque
from dataclasses import dataclass

NUM_KEPT = 20


@dataclass(frozen=True, kw_only=True)
class Received:
    at: float
    """Seconds since the epoch."""
    path: str
    delivery_id: str | None
    """The sender's id of the delivery, cut to 64 characters; None if the sender sent no id."""
    status: int
    """The HTTP status of the answer."""
    milliseconds: float
    """The time from the arrival of the request to the answer."""


class History:
    """The last `NUM_KEPT` requests, newest first."""

    def __init__(self) -> None:
        self._received: deque[Received] = deque(maxlen=NUM_KEPT)

    def add(self, received: Received) -> None:
        self._received.appendleft(received)

    def latest(self) -> tuple[Received, ...]:
        return tuple(self._received)
