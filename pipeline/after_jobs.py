"""Does the work that follows the end of a job, in threads of the runner's process.

When a job ends, the first thread counts the outcome (how the job ended) in the metrics. It also
removes files that only a running job needs, and sends the outcome to the URL or the command that
the setting `on_outcome` names. Once an hour, the second thread removes the folders of old jobs, and
deletes very old jobs from the job store.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from jobs.errors import JobError, StoreError
from jobs.job import Job
from jobs.store import JobStore
from pipeline import on_outcome, retention
from pipeline.hub.errors import HubError
from pipeline.job_store import open_job_store
from pipeline.paths import Home
from pipeline.runner_metrics import RunnerMetrics
from pipeline.settings import Settings

logger = logging.getLogger(__name__)

PRUNE_SECONDS = 3600.0
POLL_SECONDS = 0.2
RETRY_SECONDS = 5.0
"""After an error of the store, `Outcomes.follow` waits this long before it tries again."""


@contextmanager
def after_jobs(settings: Settings, home: Home, *, serves_metrics: bool) -> Iterator[None]:
    """Run the two threads that the module's docstring describes, until the `with` block ends.
    Before the first thread stops, it looks once more for ended jobs and handles their outcomes. So
    no outcome is missed.

    With `serves_metrics`, also serve the runner's metrics, unless the setting `metrics_port` is 0.
    Raises StoreError.
    """
    stop = threading.Event()
    with open_job_store(settings, home) as store:
        metrics = RunnerMetrics(store)
        if serves_metrics and settings.jobs.metrics_port:
            try:
                metrics.serve(settings.jobs.metrics_port)
            except OSError as error:
                # Continue, because jobs can run without metrics.
                said = "metrics cannot use port %d (%s); set another metrics_port under [jobs]"
                logger.warning(said, settings.jobs.metrics_port, error.strerror)
        outcomes = Outcomes(
            store,
            (
                metrics.count,
                lambda job: retention.remove_unneeded_files(job, home.jobs_dir / job.id),
                lambda job: _notify(settings, home, job),
            ),
        )
        threads = [
            threading.Thread(target=outcomes.follow, args=(stop,), name="outcomes"),
            threading.Thread(
                target=_prune_hourly, args=(settings, home, store, stop), name="prune"
            ),
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            stop.set()
            for thread in threads:
                thread.join()


def _notify(settings: Settings, home: Home, job: Job) -> None:
    for pipeline in settings.pipelines:
        if pipeline.name == job.spec.pipeline:
            on_outcome.notify(pipeline, job, home.jobs_dir / job.id)


def _prune_hourly(settings: Settings, home: Home, store: JobStore, stop: threading.Event) -> None:
    while True:
        try:
            retention.prune(settings, home, store)
        except Exception as error:
            # If the thread ended here, no old job would be removed until the next start.
            logger.error(
                "old jobs cannot be removed now; trying again in an hour: %s",
                error,
                exc_info=not isinstance(error, StoreError | HubError | OSError),
            )
        if stop.wait(PRUNE_SECONDS):
            return


class Outcomes:
    """Calls every handler for each job that ends. The job store records which outcomes were
    handled. Every outcome is handled at least once. If the process is killed, an outcome may be
    handled twice."""

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
