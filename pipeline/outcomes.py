"""Calls handlers when a job has ended. The handlers are functions that the caller passes to
`Outcomes`.

The handlers run in a thread of their own, so a handler that is slow or fails does not disturb the
runner. A file, called the progress file, records which outcomes were handled. Every outcome is
handled at least once. If the process is killed, an outcome may be handled twice.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from jobs.errors import JobError
from jobs.folder import write_atomically
from jobs.job import Job
from jobs.store import JobStore

logger = logging.getLogger(__name__)

NUM_WATCHED = 1000
"""`poll` looks at this many of the newest jobs. It also looks at the job `since` (a field of the
progress file) and at every newer job. This second group alone is not enough: if the database is
lost, a new database begins again with the first id, so its jobs may have lower ids than `since`."""
POLL_SECONDS = 0.2
RETRY_SECONDS = 5.0
"""After an error of the store or of the progress file, `follow` waits this long before it tries
again."""


class _Progress(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    ended: dict[str, float]
    """Id of a handled job → the job's end time (Unix time). The id alone is not enough: if the
    database is lost, a new database gives the ids of handled jobs to new jobs."""
    since: str | None = None
    """The id of the oldest job that had not ended when this field was last updated. If all jobs had
    ended, this is the id that the next job gets. All jobs with lower ids have been handled. None if
    an older version of hotpush wrote the file."""


class Outcomes:
    """Calls every handler for each job that ends.

    The progress file lists each handled job. It is not enough to record only the end time of the
    last handled job, because a job with an earlier end time may still come. There are two such
    cases: the clock was set back before the job ended, or the end of the job appears late in the
    store.
    """

    def __init__(
        self, store: JobStore, progress_file: Path, handlers: Sequence[Callable[[Job], None]]
    ) -> None:
        self._store = store
        self._file = progress_file
        self._handlers = handlers
        self._unwritten: dict[str, float] = {}
        """Id → end time of the handled jobs that may be missing from the progress file, because a
        write of the file failed."""

    def start(self) -> None:
        """If there is no readable progress file, write one that lists all ended jobs as handled.

        Raises StoreError, or OSError if the progress file cannot be read or written.
        """
        self._read()

    def poll(self) -> int:
        """Handle each ended job that the progress file does not list; returns the number of these
        jobs.

        If a handler raises an exception, this method logs the exception. The outcome counts as
        handled, so the handler is not called again. Raises StoreError, or OSError if the progress
        file cannot be read or written.
        """
        progress = self._read()
        # Call `first_unended` before `when_ended`. In the other order, a job that ends between the
        # two calls would be left out.
        since = self._store.first_unended()
        ended = self._store.when_ended(among=NUM_WATCHED, since=progress.since)
        known = {**progress.ended, **self._unwritten}
        handled = {each: at for each, at in known.items() if each in ended}
        new = [job_id for job_id, at in ended.items() if handled.get(job_id) != at]
        for job_id in new:
            job = self._store.get(job_id)
            for handler in self._handlers:
                try:
                    handler(job)
                except Exception:
                    logger.exception(
                        "a handler failed for the outcome of %s", job.id, extra={"job_id": job.id}
                    )
            handled[job_id] = self._unwritten[job_id] = ended[job_id]
            self._write(_Progress(ended=handled, since=progress.since))
        if new or self._unwritten:
            self._write(_Progress(ended=handled, since=since))
            self._unwritten.clear()
        return len(new)

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
            except (JobError, OSError) as error:
                logger.error("outcomes cannot be handled now; trying again: %s", error)
                stop.wait(RETRY_SECONDS)
            except Exception:
                # If the thread ended here, nobody would handle the later outcomes.
                logger.exception("outcomes cannot be handled; trying again at the next change")
                is_due = False
            if is_last:
                return

    def _read(self) -> _Progress:
        try:
            return _Progress.model_validate_json(self._file.read_bytes())
        except FileNotFoundError:
            pass
        except ValidationError as error:
            logger.warning(
                "the progress file %s cannot be read (%s), so it is replaced; every job that has "
                "already ended counts as handled, even if no handler has got its outcome yet; look "
                "at the newest outcomes yourself",
                self._file,
                error.errors()[0]["msg"],
            )
        since = self._store.first_unended()
        handled = self._store.when_ended(among=NUM_WATCHED, since=since)
        progress = _Progress(ended=handled, since=since)
        self._write(progress)
        return progress

    def _write(self, progress: _Progress) -> None:
        write_atomically(self._file, progress.model_dump_json(), durable=True)
