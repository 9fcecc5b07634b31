"""Keeps deliveries that wait for a call of their durable handler, in queues in memory. There is one
queue for each pair of handler path and repository.

The deliveries of one queue are handled one after another, in the order of their arrival. Different
queues are handled concurrently.
"""

from collections import deque
from collections.abc import Iterable

from receiver.delivery_log import StoredDelivery

QueueKey = tuple[str, str | None, str | None]
"""The key of a queue: (path, repository, None). A delivery without a repository gets its own queue
with the key (path, None, delivery id)."""


def queue_of(delivery: StoredDelivery) -> QueueKey:
    return delivery.path, delivery.repository, None if delivery.repository else delivery.id


class RepositoryQueues:
    """All queues. After `take` has returned a delivery, its queue is busy until `release` is
    called. While a queue is busy, `take` returns no other delivery of this queue."""

    def __init__(self) -> None:
        self._waiting: deque[StoredDelivery] = deque()
        self._busy: set[QueueKey] = set()

    def extend(self, deliveries: Iterable[StoredDelivery]) -> None:
        self._waiting.extend(deliveries)

    def has_next(self) -> bool:
        return any(queue_of(delivery) not in self._busy for delivery in self._waiting)

    def take(self) -> StoredDelivery | None:
        """Remove and return the first delivery whose queue is not busy, and mark its queue as busy.
        Returns None if there is no such delivery."""
        for place, delivery in enumerate(self._waiting):
            if queue_of(delivery) not in self._busy:
                del self._waiting[place]
                self._busy.add(queue_of(delivery))
                return delivery
        return None

    def release(self, queue: QueueKey) -> None:
        self._busy.discard(queue)

    def drop(self, queue: QueueKey) -> list[StoredDelivery]:
        """Remove and return all deliveries that wait in this queue. The queue stays busy."""
        dropped = [each for each in self._waiting if queue_of(each) == queue]
        self._waiting = deque(each for each in self._waiting if queue_of(each) != queue)
        return dropped

    def busy_repositories(self) -> list[tuple[str, str]]:
        """The path and the repository of each busy queue, without the queues of deliveries that
        have no repository."""
        return [(path, repository) for path, repository, _ in self._busy if repository is not None]

    def clear(self) -> None:
        self._waiting.clear()
        self._busy.clear()
