"""The deliveries that wait in memory for a call of their handler. The handlers are *durable*: each
delivery is stored in the delivery log (`receiver/delivery_log.py`) before its handler is called.
The worker (`receiver/durable.py`) reads the deliveries from the log.

The deliveries of one repository to one handler form a queue. The deliveries of one queue are
handled one after another, in the order of their arrival. Deliveries of different queues may be
handled at the same time.
"""

from collections import deque
from collections.abc import Iterable

from receiver.delivery_log import StoredDelivery

QueueKey = tuple[str, str | None, str | None]
"""The key of a queue: (path of the handler, repository, None). Each delivery without a repository
has a queue of its own, with the key (path of the handler, None, delivery id)."""


def queue_of(delivery: StoredDelivery) -> QueueKey:
    return delivery.path, delivery.repository, None if delivery.repository else delivery.id


class RepositoryQueues:
    """All queues. After `take` has returned a delivery, the queue of this delivery is *busy* until
    the queue is released. While a queue is busy, `take` returns no other delivery of this queue."""

    def __init__(self) -> None:
        self._waiting: dict[QueueKey, deque[StoredDelivery]] = {}
        """Queue → the deliveries that wait in this queue, oldest first. A queue in which no
        delivery waits is not in this dict."""
        self._busy: set[QueueKey] = set()

    def extend(self, deliveries: Iterable[StoredDelivery]) -> None:
        for delivery in deliveries:
            self._waiting.setdefault(queue_of(delivery), deque()).append(delivery)

    def has_next(self) -> bool:
        return any(queue not in self._busy for queue in self._waiting)

    def take(self) -> StoredDelivery | None:
        """Remove and return a delivery of a queue that is not busy, and make this queue busy.
        Returns None if all queues with deliveries are busy."""
        queue = next((queue for queue in self._waiting if queue not in self._busy), None)
        if queue is None:
            return None
        self._busy.add(queue)
        return self._pop(queue)

    def take_next(self, queue: QueueKey) -> StoredDelivery | None:
        """Remove and return the next delivery of this busy queue. The queue stays busy. If no
        delivery waits in the queue, release the queue and return None."""
        if queue in self._waiting:
            return self._pop(queue)
        self.release(queue)
        return None

    def release(self, queue: QueueKey) -> None:
        self._busy.discard(queue)

    def drop(self, queue: QueueKey) -> list[StoredDelivery]:
        """Remove and return all deliveries that wait in this queue. The queue stays busy."""
        return list(self._waiting.pop(queue, ()))

    def busy_repositories(self) -> list[tuple[str, str]]:
        """The path and the repository of each busy queue that belongs to a repository."""
        return [(path, repository) for path, repository, _ in self._busy if repository is not None]

    def clear(self) -> None:
        self._waiting.clear()
        self._busy.clear()

    def _pop(self, queue: QueueKey) -> StoredDelivery:
        waiting = self._waiting[queue]
        delivery = waiting.popleft()
        if not waiting:
            del self._waiting[queue]
        return delivery
