"""What follows an outcome: whoever asked is told, it is counted, and its job's folder is cleared.

Beside the runner, in a thread with a store of its own: nothing here can hold up or lose a job. How
far it has come stands in a file: a kill may lead to telling an outcome twice, never to none.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from jobs.errors import StoreError
from jobs.folder import write_whole
from jobs.record import Job
from jobs.store import JobStore

logger = logging.getLogger(__name__)

NUM_WATCHED = 1000
"""Newest jobs among which those that ended are looked for."""
POLL_SECONDS = 0.2


class _Told(BaseModel):
    model_config = ConfigDict(frozen=True)

    ended_at: float
    job_id: str = ""


class Outcomes:
    """Calls `followers` once for each job that ends, in the order in which they ended."""

    def __init__(
        self, store: JobStore, progress_file: Path, followers: Sequence[Callable[[Job], None]]
    ) -> None:
        self._store = store
        self._file = progress_file
        self._followers = followers

    def look(self) -> int:
        """See to the jobs that ended since the last look; returns how many. Raises StoreError.

        Without a progress file the past is left alone. A follower that raises is logged, and the
        outcome counts as told.
        """
        told = self._told()
        ended = [
            job
            for job in self._store.list_ended(told.ended_at, among=NUM_WATCHED)
            if (job.ended_at, job.id) > (told.ended_at, told.job_id)
        ]
        for job in ended:
            for follower in self._followers:
                try:
                    follower(job)
                except Exception:
                    logger.exception("After the outcome of %s", job.id, extra={"job_id": job.id})
            assert job.ended_at is not None
            self._write(_Told(ended_at=job.ended_at, job_id=job.id))
        return len(ended)

    def follow(self, stop: threading.Event) -> None:
        """Look whenever the store has changed, and a last time when `stop` is set."""
        self._told()  # from now on, also where nothing ends for a long while
        while True:
            is_last = stop.wait(POLL_SECONDS)
            try:
                if is_last or self._store.changed():
                    self.look()
            except (StoreError, OSError) as error:
                logger.error("Outcomes are told later: %s", error)
                stop.wait(1.0)
            if is_last:
                return

    def _told(self) -> _Told:
        try:
            return _Told.model_validate_json(self._file.read_bytes())
        except (FileNotFoundError, ValidationError):
            told = _Told(ended_at=time.time())
            self._write(told)
            return told

    def _write(self, told: _Told) -> None:
        write_whole(self._file, told.model_dump_json(), durable=True)
