"""Calls handlers when a job has ended. The handlers are functions that the caller passes to
`Outcomes`.

The handlers run in a thread of their own, so a handler that is slow or fails does not disturb the
runner. The job store records which outcomes were handled. Every outcome is handled at least once.
If the process is killed, an outcome may be handled twice.
"""

import logging
import threading
from collections.abc import Callable, Sequence

from jobs.errors import JobError
from jobs.job import Job
from jobs.store import JobStore

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.2
RETRY_SECONDS = 5.0
"""After an error of the store, `follow` waits this long before it tries again."""


class Outcomes:
    """Calls every handler for each job that ends."""

    def __init__(self, store: JobStore, handlers: Sequence[Callable[[Job], None]]) -> None:
        self._store = store
        self._handlers = handlers

    def poll(self) -> int:
        """Handle each ended job that was not handled yet; returns the number of these jobs.

        If a handler raises an exception, this method logs the exception. The outcome counts as
        handled, so the handler is not called again. Raises StoreError.
        """
        jobs = self._store.unhandled()
        for job in jobs:
            for handler in self._handlers:
                try:
                    handler(job)
                except Exception:
                    logger.exception(
                        "a handler failed for the outcome of %s", job.id, extra={"job_id": job.id}
                    )
            self._store.handled(job.id)
        return len(jobs)

    def follow(self, stop: threading.Event) -> None:
        """Call `poll` whenever the store has changed. If `poll` fails, log the error, and call
        `poll` again later. When `stop` is set, call `poll` one last time and return."""
        is_due = False
        while True:
            is_last = stop.wait(POLL_SECONDS)
            try:
                # The store reports each change only once. Remember the change until `poll` has
                # succeeded.
                is_due = is_due or is_last or self._store.changed()
                if is_due:
                    self.poll()
                    is_due = False
            except Exception as error:
                # If the thread ended here, nobody would handle the later outcomes.
                logger.error(
                    "outcomes cannot be handled now; trying again: %s",
                    error,
                    exc_info=not isinstance(error, JobError),
                )
                stop.wait(RETRY_SECONDS)
            if is_last:
                return
