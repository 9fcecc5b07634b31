"""`JobStore`: all jobs with their states, and the deliveries that led to them.

The store starts no process; `jobs/runner.py` reads the store and runs the jobs.
"""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Self

from sqlalchemy import select

from jobs.errors import JobNotFound, OlderSchema
from jobs.job import Delivery, Job, JobRequest, Submission, delivery_ids, failure
from jobs.migrations import HEAD, check_schema, migrate
from jobs.outcome import JobOutcome
from jobs.reader import JobReader
from jobs.retention import forget_ignored, forget_jobs
from jobs.rows import (
    end_job,
    fetch_job,
    fetch_leased,
    fetch_successor,
    insert_ignored,
    is_claimable,
    job_id_of,
    number_of,
    update_job,
)
from jobs.schema import JOBS, connect, writing
from jobs.spec import JobSpec
from jobs.submissions import submit_all

__all__ = ["Delivery", "JobRequest", "JobStore", "Submission"]


class JobStore(JobReader):
    """Safe for several threads and processes. Every method is one transaction.

    If the database fails, every method raises StoreError and changes nothing.
    """

    @classmethod
    def open(cls, url_or_path: str | Path, *, clock: Callable[[], float] | None = None) -> Self:
        """Open, create or upgrade the store. Raises NewerSchema if a newer release wrote the store.

        Without a `clock`, times come from the Postgres server, because the clocks of its clients
        may differ; with SQLite, times come from this machine.
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
        """Open the store without creating or upgrading anything; None if the store has no tables
        yet.

        Raises NewerSchema if a newer release wrote the store, and OlderSchema if the store must
        first be upgraded.
        """
        engine = connect(url_or_path, only_reads=True)
        try:
            revision = check_schema(engine)
            if revision not in (None, HEAD):
                shown = engine.url.render_as_string(hide_password=True)
                raise OlderSchema(
                    f"The job store {shown} has the older schema {revision!r} and cannot be read "
                    f"yet; `pipeline up` upgrades it to {HEAD!r}."
                )
        except BaseException:
            engine.dispose()
            raise
        if revision is None:
            engine.dispose()
            return None
        return cls(engine)

    # Deliveries and submissions

    def submit(
        self,
        spec: JobSpec,
        *,
        payload: dict[str, Any] | None = None,
        delivery: Delivery | None = None,
        by_hand: bool = False,
    ) -> Submission:
        """Record `delivery` and make `spec` pending; the store does both or neither.

        If `delivery` was seen before, this returns the job that it led to. If that job failed or
        was cancelled, this returns the pipeline's job of a later push; if there is none, `spec` is
        submitted again. A delivery that was ignored before now leads to a job. If the pipeline's
        latest job has the same `dedupe_key`, this returns that job, unless it failed or was
        cancelled. If the pipeline has a pending job, that job absorbs `spec`: it takes the new
        command, settings and payload, and keeps the start of its own range.

        A job that is submitted by hand (`by_hand`) waits beside the pending job of pushes; neither
        job absorbs the other. Raises PendingJob if a job that was submitted by hand is already
        pending for the pipeline.
        """
        request = JobRequest(spec=spec, payload=payload, delivery=delivery, by_hand=by_hand)
        return self.submit_all([request])[0]

    def submit_all(self, requests: Sequence[JobRequest]) -> list[Submission]:
        """Submit the requests in order, each as `submit` does; the store takes all of them or
        none."""
        with writing(self._engine) as connection:
            return submit_all(connection, requests, self._now(connection))

    def ignore(self, delivery: Delivery, reason: str) -> None:
        """Record that `delivery` leads to no job, unless the delivery already has an answer."""
        with writing(self._engine) as connection:
            insert_ignored(connection, delivery, self._now(connection), reason)

    # What a runner does

    def claim(self, owner: str, lease_seconds: float) -> Job | None:
        """Lease to `owner` the pending job that has been due longest. The job is now RUNNING.

        None if no pending job is due, or if every due job waits for the running job of its
        pipeline.
        """
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
            return update_job(
                connection,
                job_id_of(number),
                state="RUNNING",
                attempt=1,
                started_at=now,
                owner=owner,
                lease_until=now + lease_seconds,
            )

    def started(self, job_id: str, owner: str, handle: str) -> None:
        """Record the launcher's handle of the attempt. Raises LeaseLost."""
        with writing(self._engine) as connection:
            fetch_leased(connection, job_id, owner)
            update_job(connection, job_id, handle=handle)

    def heartbeat(self, job_id: str, owner: str, lease_seconds: float) -> bool:
        """Extend the lease. Returns True if somebody asked to cancel the job. Raises LeaseLost.

        Even a lease that has run out is extended, as long as no other runner has adopted the job.
        """
        with writing(self._engine) as connection:
            job = fetch_leased(connection, job_id, owner)
            update_job(connection, job_id, lease_until=self._now(connection) + lease_seconds)
            return job.cancel_requested

    def finish(self, job_id: str, owner: str, outcome: JobOutcome | None) -> Job:
        """End the job. An `outcome` of None means a plain command that exited with 0.

        If a job of pushes failed, the pending job of pushes takes over its commits. Raises
        LeaseLost.
        """
        with writing(self._engine) as connection:
            job = fetch_leased(connection, job_id, owner)
            return end_job(connection, job, outcome, self._now(connection))

    def retry(self, job_id: str, owner: str, reason: str) -> Job:
        """Start the next attempt of a job whose process vanished, or end the job as failed.

        The job fails after `max_attempts` lost attempts. A job of pushes also fails if another job
        of pushes is pending; that job then takes over the commits. Returns the job, which is
        RUNNING or has ended. Raises LeaseLost.
        """
        with writing(self._engine) as connection:
            job = fetch_leased(connection, job_id, owner)
            num_lost = job.num_lost + 1
            successor = fetch_successor(connection, job)
            if successor is None and num_lost < job.spec.max_attempts:
                return update_job(
                    connection, job_id, attempt=job.attempt + 1, num_lost=num_lost, handle=None
                )
            if successor is not None:
                reason = f"{reason} {successor.id} takes over its commits."
            else:
                reason = f"{reason} That was attempt {num_lost} of {job.spec.max_attempts}."
            job = update_job(connection, job_id, num_lost=num_lost)
            outcome = failure(job, stage="lost", reason=reason)
            return end_job(connection, job, outcome, self._now(connection))

    def release(self, job_id: str, owner: str) -> None:
        """Give up the lease of a job whose process this runner has stopped or never started.

        Any runner can now adopt the job and start a new attempt. Raises LeaseLost.
        """
        with writing(self._engine) as connection:
            job = fetch_leased(connection, job_id, owner)
            update_job(
                connection,
                job_id,
                attempt=job.attempt + 1,
                handle=None,
                owner=None,
                lease_until=self._now(connection),
            )

    def adopt(self, owner: str, lease_seconds: float) -> list[Job]:
        """Lease to `owner` each RUNNING job of another runner, if the lease of that job has run
        out."""
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
                update_job(
                    connection, job_id_of(number), owner=owner, lease_until=now + lease_seconds
                )
                for number in numbers
            ]

    # What keeps the store small

    def forget(self, before: float, *, newest: int, kept: Collection[str] = ()) -> Sequence[str]:
        """Delete the jobs that ended before this moment, with their deliveries; returns their ids.

        The `newest` jobs of each pipeline stay, and so do the jobs in `kept`. Deliveries that led
        to no job go if they were received before this moment. A delivery that is forgotten is new
        when it is repeated.
        """
        forget_ignored(self._engine, before)
        return forget_jobs(self._engine, before, newest=newest, kept=kept)

    def replace_reasons(self, job_ids: Collection[str], reason: str) -> None:
        """Replace the reason of each outcome that has one: it may quote rows that must go."""
        for job_id in job_ids:
            with writing(self._engine) as connection:
                try:
                    job = fetch_job(connection, number_of(job_id))
                except JobNotFound:
                    continue
                if job.outcome is not None and job.outcome.reason is not None:
                    outcome = job.outcome.model_copy(update={"reason": reason})
                    update_job(connection, job_id, outcome=outcome.model_dump_json())

    # What a person does

    def cancel(self, job_id: str) -> Job:
        """End a pending job, or ask a running one to stop. An ended job stays as it is.

        Raises JobNotFound.
        """
        with writing(self._engine) as connection:
            job = fetch_job(connection, number_of(job_id))
            match job.state:
                case "SCHEDULING":
                    outcome = JobOutcome(
                        result="cancelled",
                        reason="Cancelled before it was started.",
                        delivery_ids=delivery_ids(job),
                        job_id=job.id,
                    )
                    return end_job(connection, job, outcome, self._now(connection))
                case "RUNNING":
                    return update_job(connection, job_id, cancel_requested=True)
                case _:
                    return job
