"""In which order deliveries are called: those of one repository one after another, others beside
each other. Knows what waits in memory; stores nothing."""

from collections import deque
from collections.abc import Iterable

from receiver.delivery_log import StoredDelivery

Line = tuple[str, str | None, str | None]
"""Path and repository; for a delivery without a repository, its id makes a line of its own."""


def line_of(delivery: StoredDelivery) -> Line:
    return delivery.path, delivery.repository, None if delivery.repository else delivery.id


class Lines:
    def __init__(self) -> None:
        self._waiting: deque[StoredDelivery] = deque()
        self._busy: set[Line] = set()

    def extend(self, deliveries: Iterable[StoredDelivery]) -> None:
        self._waiting.extend(deliveries)

    def has_next(self) -> bool:
        return any(line_of(delivery) not in self._busy for delivery in self._waiting)

    def take(self) -> StoredDelivery | None:
        """The first delivery whose line is free; the line is then busy until `leave`."""
        for place, delivery in enumerate(self._waiting):
            if line_of(delivery) not in self._busy:
                del self._waiting[place]
                self._busy.add(line_of(delivery))
                return delivery
        return None

    def leave(self, line: Line) -> None:
        self._busy.discard(line)

    def drop(self, line: Line) -> list[StoredDelivery]:
        """What waits behind a delivery that will be called again later; taken out."""
        dropped = [each for each in self._waiting if line_of(each) == line]
        self._waiting = deque(each for each in self._waiting if line_of(each) != line)
        return dropped

    def busy_repositories(self) -> list[tuple[str, str]]:
        return [(path, repository) for path, repository, _ in self._busy if repository is not None]

    def clear(self) -> None:
        self._waiting.clear()
        self._busy.clear()
