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
    job_id_of,
    number_of,
    select_jobs,
)
from jobs.schema import JOB_DELIVERIES, JOBS, ChangeDetector, file_of, reading


class JobReader:
    """Several threads and processes may use the store at the same time, but only one thread may
    call `changed`. Every method raises StoreError if the database fails. All times are seconds
    since the epoch.

    `clock` returns the present time. Default: the clock that `JobStore.open` describes.
    """

    def __init__(self, engine: Engine, clock: Callable[[], float] | None = None) -> None:
        self._engine = engine
        self._clock = clock
        self._changes = ChangeDetector(engine)
        self._file = file_of(engine)
        """The SQLite file (see `file_of`) whose tables are known to have the current schema. If
        another file has replaced it, `JobStore.follow_file` creates or upgrades the tables of that
        file. None for Postgres."""

    def close(self) -> None:
        self._changes.close()
        self._engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def get(self, job_id: str) -> Job:
        """The job with this id. Raises JobNotFound."""
        with reading(self._engine) as connection:
            return fetch_job(connection, number_of(job_id))

    def when_ended(self, *, among: int, since: str | None = None) -> dict[str, float]:
        """When jobs ended: job id → time, earliest time first. Leaves out jobs that have not ended.

        Looks at the last `among` job ids, including the ids of deleted jobs. If `since` (a job's
        id) is given, also looks at the job `since` and at every newer job."""
        with reading(self._engine) as connection:
            first = (connection.scalar(select(func.max(JOBS.c.number))) or 0) - among + 1
            if since is not None:
                first = min(first, number_of(since))
            query = (
                select(JOBS.c.number, JOBS.c.ended_at)
                .where(JOBS.c.number >= first, JOBS.c.ended_at.is_not(None))
                .order_by(JOBS.c.ended_at, JOBS.c.number)
            )
            return {job_id_of(number): ended for number, ended in connection.execute(query)}

    def first_unended(self) -> str:
        """The id of the oldest job that has not ended. If all jobs have ended, an id that is higher
        than the id of every job."""
        unended = JOBS.c.state.in_(OPEN_STATES)
        with reading(self._engine) as connection:
            first = connection.scalar(select(func.min(JOBS.c.number)).where(unended))
            if first is None:
                first = (connection.scalar(select(func.max(JOBS.c.number))) or 0) + 1
        return job_id_of(first)

    def has_open_jobs(self) -> bool:
        """Whether any job has not ended."""
        unended = select(JOBS.c.number).where(JOBS.c.state.in_(OPEN_STATES)).limit(1)
        with reading(self._engine) as connection:
            return connection.scalar(unended) is not None

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
        """The jobs for a push whose newest commit is `new_sha`, newest job first.

        There may be several jobs: several pipelines may follow the dataset, and another job may
        have taken over the commits of a failed job.
        """
        numbers = select(JOB_DELIVERIES.c.job_number).where(JOB_DELIVERIES.c.new_sha == new_sha)
        query = select(JOBS).where(JOBS.c.number.in_(numbers)).order_by(JOBS.c.number.desc())
        with reading(self._engine) as connection:
            return select_jobs(connection, query)

    def waited_since(self, job: Job) -> float:
        """When the oldest delivery of the job was received. Deliveries that the job took over from
        a failed job count too. If the job has no deliveries, for example because a person submitted
        it, returns the time when the job was created."""
        with reading(self._engine) as connection:
            received_at: float | None = connection.scalar(
                select(func.min(JOB_DELIVERIES.c.received_at)).where(
                    JOB_DELIVERIES.c.job_number == number_of(job.id)
                )
            )
        return job.created_at if received_at is None else received_at

    def seconds_to_next(self) -> float | None:
        """The number of seconds until `JobStore.claim` can return a job; 0 if a job is due now.
        None if no job is pending, or if every pending job must wait until the running job of its
        pipeline has ended."""
        with reading(self._engine) as connection:
            due = connection.scalar(select(func.min(JOBS.c.run_after)).where(is_claimable()))
            return None if due is None else max(0.0, due - self._now(connection))

    def changed(self) -> bool:
        """Whether anybody may have written to the store since the last call. True at the first
        call.

        This method is cheap enough to call many times a second. Only one thread may call it.
        """
        return self._changes.changed()

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
