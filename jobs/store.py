"""`JobStore`: which jobs there are, where each stands, and which deliveries led to them.

It starts nothing and knows no process; `jobs/runner.py` acts on what stands here.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

from sqlalchemy import Connection, Engine, func, select, text

from jobs.errors import OlderSchema
from jobs.migrations import HEAD, check_schema, migrate
from jobs.outcome import JobOutcome
from jobs.placing import place_all
from jobs.record import Delivery, Job, JobRequest, JobState, Submission, delivery_ids, failure
from jobs.rows import (
    change,
    end,
    fetch,
    fetch_leased,
    fetch_pending,
    is_claimable,
    is_delivery,
    job_id_of,
    number_of,
    read,
    write_ignored,
)
from jobs.schema import DELIVERIES, JOB_DELIVERIES, JOBS, ChangeDetector, connect, reading, writing
from jobs.spec import JobSpec

__all__ = ["Delivery", "JobRequest", "JobStore", "Submission"]


class JobStore:
    """Safe for several threads and processes. Every method is one transaction.

    All methods raise StoreError where the database fails; then nothing was changed.
    """

    def __init__(self, engine: Engine, clock: Callable[[], float] | None = None) -> None:
        self._engine = engine
        self._clock = clock
        self._changes = ChangeDetector(engine)

    @classmethod
    def open(cls, url_or_path: str | Path, *, clock: Callable[[], float] | None = None) -> Self:
        """Open, create or upgrade the store. Raises NewerSchema for one of a newer release.

        Without a `clock`, Postgres' own is used, since its clients' may differ, and this
        machine's on SQLite.
        """
        engine = connect(url_or_path)
        try:
            migrate(engine)
        except BaseException:
            engine.dispose()
            raise
        return cls(engine, clock)

    @classmethod
    def open_to_read(cls, url_or_path: str | Path) -> Self | None:
        """The store as it is, None where it has no tables yet: nothing is made or upgraded.

        Raises NewerSchema, and OlderSchema for one that its next user upgrades.
        """
        engine = connect(url_or_path, only_reads=True)
        try:
            revision = check_schema(engine)
            if revision not in (None, HEAD):
                shown = engine.url.render_as_string(hide_password=True)
                raise OlderSchema(
                    f"The job store {shown} has schema {revision!r}; `pipeline up` brings it to "
                    f"{HEAD!r}, and it cannot be read before."
                )
        except BaseException:
            engine.dispose()
            raise
        if revision is None:
            engine.dispose()
            return None
        return cls(engine)

    def close(self) -> None:
        self._changes.close()
        self._engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Deliveries and submissions

    def submit(
        self,
        spec: JobSpec,
        *,
        payload: dict[str, Any] | None = None,
        delivery: Delivery | None = None,
        joins: bool = True,
    ) -> Submission:
        """Remember `delivery` and make `spec` pending, both or neither.

        A delivery that was seen gets the job that it led to. A dedupe key that matches gets that
        job. Where the pipeline has a pending job, that one absorbs `spec`: it takes the new
        command, settings and payload, and keeps the start of its own range. A delivery that was
        ignored before is answered anew: whoever submits it has decided otherwise.

        With `joins` false a pending job is left as it is: raises PendingJob.
        """
        request = JobRequest(spec=spec, payload=payload, delivery=delivery, joins=joins)
        return self.submit_all([request])[0]

    def submit_all(self, requests: Sequence[JobRequest]) -> list[Submission]:
        """Each in turn, as `submit` does, all or none of them."""
        with writing(self._engine) as connection:
            return place_all(connection, requests, self._now(connection))

    def ignore(self, delivery: Delivery, reason: str) -> None:
        """Remember that `delivery` leads to no job. The first answer to a delivery stands."""
        with writing(self._engine) as connection:
            write_ignored(connection, delivery, self._now(connection), reason)

    def answer_to(self, source: str, delivery_id: str) -> dict[str, str] | None:
        """`{"job": id}` or `{"ignored": reason}` as first answered; None for a new delivery."""
        with reading(self._engine) as connection:
            row = connection.execute(
                select(DELIVERIES.c.job_number, DELIVERIES.c.ignored_reason).where(
                    *is_delivery(source, delivery_id)
                )
            ).one_or_none()
        if row is None:
            return None
        if row.job_number is not None:
            return {"job": job_id_of(row.job_number)}
        return {"ignored": row.ignored_reason}

    # What a runner does

    def claim(self, owner: str, lease_seconds: float) -> Job | None:
        """The pending job that is due longest and may run, now RUNNING and leased to `owner`."""
        with writing(self._engine) as connection:
            now = self._now(connection)
            number = connection.scalar(
                select(JOBS.c.number)
                .where(is_claimable(), JOBS.c.run_after <= now)
                .order_by(JOBS.c.run_after, JOBS.c.number)
                .limit(1)
            )
            if number is None:
                return None
            return change(
                connection,
                job_id_of(number),
                state="RUNNING",
                attempt=1,
                started_at=now,
                owner=owner,
                lease_until=now + lease_seconds,
            )

    def seconds_to_next(self) -> float | None:
        """How long until `claim` would find a job, 0 for one that is due, None for none."""
        with reading(self._engine) as connection:
            due = connection.scalar(select(func.min(JOBS.c.run_after)).where(is_claimable()))
            return None if due is None else max(0.0, due - self._now(connection))

    def started(self, job_id: str, owner: str, handle: str) -> None:
        """Record what the launcher knows the attempt by. Raises LeaseLost."""
        with writing(self._engine) as connection:
            fetch_leased(connection, job_id, owner)
            change(connection, job_id, handle=handle)

    def heartbeat(self, job_id: str, owner: str, lease_seconds: float) -> bool:
        """Extend the lease; True where somebody asked to cancel. Raises LeaseLost.

        A lease that ran out is extended too, as long as no other runner adopted the job.
        """
        with writing(self._engine) as connection:
            job = fetch_leased(connection, job_id, owner)
            change(connection, job_id, lease_until=self._now(connection) + lease_seconds)
            return job.cancel_requested

    def finish(self, job_id: str, owner: str, outcome: JobOutcome | None) -> Job:
        """End the job; None is a plain command that exited with 0. Raises LeaseLost.

        The range of a job that failed joins that of the pipeline's pending job.
        """
        with writing(self._engine) as connection:
            job = fetch_leased(connection, job_id, owner)
            return end(connection, job, outcome, self._now(connection))

    def retry(self, job_id: str, owner: str, reason: str) -> Job:
        """After the process vanished: the job, RUNNING in its next attempt, or ended.

        It ends as failed when it was lost `max_attempts` times, or when a pending job of its
        pipeline takes over its range. Raises LeaseLost.
        """
        with writing(self._engine) as connection:
            job = fetch_leased(connection, job_id, owner)
            num_lost = job.num_lost + 1
            successor = fetch_pending(connection, job.spec.pipeline)
            if successor is None and num_lost < job.spec.max_attempts:
                return change(
                    connection, job_id, attempt=job.attempt + 1, num_lost=num_lost, handle=None
                )
            if successor is not None:
                reason = f"{reason} {successor.id} takes over its commits."
            else:
                reason = f"{reason} That was attempt {num_lost} of {job.spec.max_attempts}."
            job = change(connection, job_id, num_lost=num_lost)
            outcome = failure(job, stage="lost", reason=reason)
            return end(connection, job, outcome, self._now(connection))

    def release(self, job_id: str, owner: str) -> None:
        """Give up the lease of a job whose process this runner has stopped, or never started.

        Any runner can adopt it now, and starts a new attempt. Raises LeaseLost.
        """
        with writing(self._engine) as connection:
            job = fetch_leased(connection, job_id, owner)
            change(
                connection,
                job_id,
                attempt=job.attempt + 1,
                handle=None,
                owner=None,
                lease_until=self._now(connection),
            )

    def adopt(self, owner: str, lease_seconds: float) -> list[Job]:
        """RUNNING jobs whose lease of another runner has ended, now leased to `owner`."""
        with writing(self._engine) as connection:
            now = self._now(connection)
            numbers = connection.scalars(
                select(JOBS.c.number)
                .where(
                    JOBS.c.state == "RUNNING",
                    JOBS.c.lease_until <= now,
                    JOBS.c.owner.is_distinct_from(owner),
                )
                .order_by(JOBS.c.number)
            ).all()
            return [
                change(connection, job_id_of(number), owner=owner, lease_until=now + lease_seconds)
                for number in numbers
            ]

    # What a person does

    def cancel(self, job_id: str) -> Job:
        """End a pending job; ask a running one to stop; leave one alone that has ended.

        Raises JobNotFound.
        """
        with writing(self._engine) as connection:
            job = fetch(connection, number_of(job_id))
            match job.state:
                case "SCHEDULING":
                    outcome = JobOutcome(
                        result="cancelled",
                        reason="Cancelled before it was started.",
                        delivery_ids=delivery_ids(job),
                        job_id=job.id,
                    )
                    return end(connection, job, outcome, self._now(connection))
                case "RUNNING":
                    return change(connection, job_id, cancel_requested=True)
                case _:
                    return job

    def get(self, job_id: str) -> Job:
        """Raises JobNotFound."""
        with reading(self._engine) as connection:
            return fetch(connection, number_of(job_id))

    def when_ended(self, *, among: int) -> dict[str, float]:
        """Id → the time it ended at, of those of the newest `among` jobs that have ended, in the
        order of these times. The jobs themselves are not read."""
        newest = select(func.max(JOBS.c.number)).scalar_subquery()
        query = (
            select(JOBS.c.number, JOBS.c.ended_at)
            .where(JOBS.c.number > newest - among, JOBS.c.ended_at.is_not(None))
            .order_by(JOBS.c.ended_at, JOBS.c.number)
        )
        with reading(self._engine) as connection:
            return {job_id_of(number): ended for number, ended in connection.execute(query)}

    def ids_ended_before(self, moment: float) -> list[str]:
        """Oldest first. The jobs themselves are not read: there may be any number of them."""
        query = select(JOBS.c.number).where(JOBS.c.ended_at < moment).order_by(JOBS.c.number)
        with reading(self._engine) as connection:
            return [job_id_of(number) for number in connection.scalars(query)]

    def list(
        self,
        pipeline: str | None = None,
        state: JobState | None = None,
        limit: int | None = None,
    ) -> list[Job]:
        """Newest first."""
        query = select(JOBS).order_by(JOBS.c.number.desc()).limit(limit)
        if pipeline is not None:
            query = query.where(JOBS.c.pipeline == pipeline)
        if state is not None:
            query = query.where(JOBS.c.state == state)
        with reading(self._engine) as connection:
            return read(connection, query)

    def waited_since(self, job: Job) -> float:
        """When the first commit that the job answers for was received: also where an earlier job
        of its pipeline failed over it. When it was submitted, for a job by hand."""
        with reading(self._engine) as connection:
            received_at: float | None = connection.scalar(
                select(func.min(JOB_DELIVERIES.c.received_at)).where(
                    JOB_DELIVERIES.c.job_number == number_of(job.id)
                )
            )
        return job.created_at if received_at is None else received_at

    def changed(self) -> bool:
        """Whether something may have been written since the last call; True at the first.

        Costs microseconds, so it can be asked many times a second. For one thread only.
        """
        return self._changes.changed()

    def now(self) -> float:
        """Seconds since the epoch by the clock that every time in the store was read from."""
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
