"""The latest requests to the handlers, for the landing page: what came, not what was in it."""

from collections import deque
from dataclasses import dataclass

NUM_KEPT = 20


@dataclass(frozen=True, kw_only=True)
class Received:
    at: float
    """Seconds since the epoch."""
    path: str
    delivery_id: str | None
    """As its sender named it, cut to 64 characters."""
    status: int
    milliseconds: float


class History:
    """The last `NUM_KEPT`, newest first."""

    def __init__(self) -> None:
        self._received: deque[Received] = deque(maxlen=NUM_KEPT)

    def add(self, received: Received) -> None:
        self._received.appendleft(received)

    def latest(self) -> tuple[Received, ...]:
        return tuple(self._received)
