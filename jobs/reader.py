"""`JobReader`: the methods of the job store that change nothing. `JobStore` adds the methods that
write."""

import time
from collections.abc import Callable, Sequence
from typing import Self

from sqlalchemy import Connection, Engine, func, select, text

from jobs.job import OPEN_STATES, Job, JobState
from jobs.rows import (
    fetch_job,
    is_claimable,
    is_paused,
    job_id_of,
    number_of,
    select_jobs,
)
from jobs.schema import CHANGES, DELIVERIES, JOBS, PAUSES, file_of, reading


class JobReader:
    """Several threads and processes may use the store at the same time, but only one thread may
    call `changed`. Every method raises StoreError if the database fails. All times are seconds
    since the epoch.

    `clock` returns the present time. Default: the clock that `JobStore.open` describes.
    """

    def __init__(self, engine: Engine, clock: Callable[[], float] | None = None) -> None:
        self._engine = engine
        self._clock = clock
        self._seen: object = None
        self._file = file_of(engine)
        """The SQLite file (see `file_of`) whose tables are known to have the current schema. If
        another file has replaced it, `JobStore.follow_file` creates the tables of that file. None
        for Postgres."""

    def close(self) -> None:
        self._engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def get(self, job_id: str) -> Job:
        """The job with this id. Raises JobNotFound."""
        with reading(self._engine) as connection:
            return fetch_job(connection, number_of(job_id))

    def unhandled(self) -> Sequence[Job]:
        """The ended jobs for which `JobStore.handled` was not called, earliest end first."""
        query = select(JOBS).where(JOBS.c.ended_at.is_not(None), JOBS.c.handled_at.is_(None))
        with reading(self._engine) as connection:
            return select_jobs(connection, query.order_by(JOBS.c.ended_at, JOBS.c.number))

    def paused(self) -> dict[str, float]:
        """The paused pipelines: name → when the pause began."""
        with reading(self._engine) as connection:
            return {row.pipeline: row.since for row in connection.execute(select(PAUSES))}

    def has_open_jobs(self) -> bool:
        """Whether any job has not ended. Pending jobs of paused pipelines do not count."""
        unended = select(JOBS.c.number).where(JOBS.c.state.in_(OPEN_STATES))
        waits = (JOBS.c.state == "SCHEDULING") & JOBS.c.pipeline.is_not(None) & is_paused()
        with reading(self._engine) as connection:
            return connection.scalar(unended.where(~waits).limit(1)) is not None

    def ids_ended_before(self, moment: float) -> list[str]:
        """The ids of the jobs that ended before `moment`, in the order of their creation."""
        query = select(JOBS.c.number).where(JOBS.c.ended_at < moment).order_by(JOBS.c.number)
        with reading(self._engine) as connection:
            return [job_id_of(number) for number in connection.scalars(query)]

    def list(
        self,
        pipeline: str | None = None,
        state: JobState | None = None,
        limit: int | None = None,
    ) -> list[Job]:
        """The jobs, newest first. An argument that is None does not limit the list."""
        query = select(JOBS).order_by(JOBS.c.number.desc()).limit(limit)
        if pipeline is not None:
            query = query.where(JOBS.c.pipeline == pipeline)
        if state is not None:
            query = query.where(JOBS.c.state == state)
        with reading(self._engine) as connection:
            return select_jobs(connection, query)

    def of_commit(self, new_sha: str) -> Sequence[Job]:
        """The jobs of this commit, newest job first: those that a delivery of this commit led to,
        and those that have trained on exactly this commit. Several pipelines may follow the
        dataset."""
        linked = select(DELIVERIES.c.job_number).where(DELIVERIES.c.announced == new_sha)
        is_of_commit = JOBS.c.number.in_(linked) | (JOBS.c.head == new_sha)
        query = select(JOBS).where(is_of_commit).order_by(JOBS.c.number.desc())
        with reading(self._engine) as connection:
            return select_jobs(connection, query)

    def waited_since(self, job: Job) -> float:
        """When the oldest delivery was received whose commits the job covers: the job's own
        deliveries and, for a push job, those of the jobs that have failed since the pipeline's last
        completed one. If there is no delivery, for example because a person submitted the job,
        returns the time when the job was created."""
        number, columns = number_of(job.id), JOBS.c
        is_before = (columns.pipeline == job.spec.pipeline) & columns.by_hand.is_(False)
        is_before &= columns.number < number
        done = select(func.max(columns.number)).where(is_before, columns.state == "COMPLETED")
        failed = select(columns.number).where(is_before, columns.state == "ERROR")
        oldest = select(func.min(DELIVERIES.c.received_at))
        with reading(self._engine) as connection:
            numbers = [number]
            if not job.by_hand:
                since = connection.scalar(done) or 0
                numbers += connection.scalars(failed.where(columns.number > since))
            received_at: float | None = connection.scalar(
                oldest.where(DELIVERIES.c.job_number.in_(numbers))
            )
        return job.created_at if received_at is None else received_at

    def seconds_to_next(self) -> float | None:
        """The number of seconds until `JobStore.claim` can return a job; 0 if a job is due now.
        None if no job is pending, or if every pending job must wait until the running job of its
        pipeline, or a pause, has ended."""
        with reading(self._engine) as connection:
            due = connection.scalar(select(func.min(JOBS.c.run_after)).where(is_claimable()))
            return None if due is None else max(0.0, due - self._now(connection))

    def changed(self) -> bool:
        """Whether anybody may have written to the store since the last call. True at the first
        call.

        This method is cheap enough to call many times a second. Only one thread may call it.
        """
        # A transaction that began earlier may commit later. So compare a number that every writer
        # changes, and no number of the database's own.
        with reading(self._engine) as connection:
            seen = file_of(self._engine), connection.scalar(select(CHANGES.c.number))
        changed, self._seen = seen != self._seen, seen
        return changed

    def now(self) -> float:
        """The present time by the store's clock, in seconds since the epoch."""
        with reading(self._engine) as connection:
            return self._now(connection)

    def _now(self, connection: Connection) -> float:
        if self._clock is not None:
            return self._clock()
        if connection.dialect.name == "postgresql":
            return float(
                connection.execute(
                    text("SELECT extract(epoch FROM clock_timestamp())")
                ).scalar_one()
            )
        return time.time()
