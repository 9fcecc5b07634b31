"""Reads a job's log by byte offset, and follows it until the job has ended."""

import time
from collections.abc import Iterator
from pathlib import Path

from jobs.folder import LOG
from jobs.store import JobStore


def read_log(jobs_dir: Path, job_id: str, offset: int = 0, max_bytes: int = 1 << 20) -> bytes:
    """What stands in the log from the byte `offset` on; nothing where there is no log yet."""
    try:
        with (jobs_dir / job_id / LOG).open("rb") as log:
            log.seek(offset)
            return log.read(max_bytes)
    except FileNotFoundError:
        return b""


def follow_log(
    store: JobStore, jobs_dir: Path, job_id: str, *, offset: int = 0, poll_seconds: float = 0.1
) -> Iterator[bytes]:
    """Pieces of the log as they are written, from `offset` to the end of the job.

    Pieces end where the last write did, which may be inside a line or a character. Raises
    JobNotFound.
    """
    while True:
        # Asked before the read: what is written before the end is read after it.
        has_ended = store.get(job_id).has_ended
        while piece := read_log(jobs_dir, job_id, offset):
            offset += len(piece)
            yield piece
        if has_ended:
            return
        time.sleep(poll_seconds)
