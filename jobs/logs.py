"""Reads a job's log from a byte offset on, and follows the log until the job has ended."""

import time
from collections.abc import Iterator
from pathlib import Path

from jobs.folder import LOG, is_of_another_job
from jobs.job import Job
from jobs.store import JobStore


def read_log(jobs_dir: Path, job: Job, offset: int = 0, max_bytes: int = 1 << 20) -> bytes:
    """Up to `max_bytes` of the log, starting at byte `offset`. Empty if there is no log yet."""
    folder = jobs_dir / job.id
    if is_of_another_job(folder, job.identity):
        return b""
    try:
        with (folder / LOG).open("rb") as log:
            log.seek(offset)
            return log.read(max_bytes)
    except FileNotFoundError:
        return b""


def follow_log(
    store: JobStore, jobs_dir: Path, job_id: str, *, offset: int = 0, poll_seconds: float = 0.1
) -> Iterator[bytes]:
    """Yields the log in pieces while the job writes it, starting at byte `offset`. Returns when the
    job has ended.

    A piece may end in the middle of a line or of a character. Raises JobNotFound.
    """
    while True:
        # Read the state before the log. If the job has already ended at this point, the log that is
        # read below is complete.
        job = store.get(job_id)
        while piece := read_log(jobs_dir, job, offset):
            offset += len(piece)
            yield piece
        if job.has_ended:
            return
        time.sleep(poll_seconds)
