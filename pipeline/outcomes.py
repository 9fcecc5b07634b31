"""What follows an outcome: whoever asked is told, it is counted, and its job's folder is cleared.

Beside the runner, in a thread with a store of its own: nothing here can hold up or lose a job. How
far it has come stands in a file: a kill may lead to telling an outcome twice, never to none.
"""

import logging
import threading
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
    model_config = ConfigDict(frozen=True, extra="forbid")

    ended: dict[str, float]
    """Id → the time it ended at: a lost database's ids begin anew."""


class Outcomes:
    """Calls `followers` once for each job that ends.

    Which ones were told is remembered job by job, since a later end need not have a later time:
    clocks are set back, and of two runners' transactions the earlier may be seen last.
    """

    def __init__(
        self, store: JobStore, progress_file: Path, followers: Sequence[Callable[[Job], None]]
    ) -> None:
        self._store = store
        self._file = progress_file
        self._followers = followers

    def begin(self) -> None:
        """Without a progress file, leave the past alone and follow from now on. Raises
        StoreError."""
        self._told()

    def look(self) -> int:
        """See to the jobs that ended since the last look; returns how many. Raises StoreError.

        A follower that raises is logged, and the outcome counts as told.
        """
        told = self._told()
        ended = self._store.when_ended(among=NUM_WATCHED)
        new = [job_id for job_id, at in ended.items() if told.get(job_id) != at]
        for job_id in new:
            job = self._store.get(job_id)
            for follower in self._followers:
                try:
                    follower(job)
                except Exception:
                    logger.exception("After the outcome of %s", job.id, extra={"job_id": job.id})
            told = {each: at for each, at in told.items() if each in ended}
            told[job_id] = ended[job_id]
            self._write(told)
        return len(new)

    def follow(self, stop: threading.Event) -> None:
        """Look whenever the store has changed, and a last time when `stop` is set."""
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

    def _told(self) -> dict[str, float]:
        try:
            return _Told.model_validate_json(self._file.read_bytes()).ended
        except (FileNotFoundError, ValidationError):
            told = self._store.when_ended(among=NUM_WATCHED)
            self._write(told)
            return told

    def _write(self, told: dict[str, float]) -> None:
        write_whole(self._file, _Told(ended=told).model_dump_json(), durable=True)
