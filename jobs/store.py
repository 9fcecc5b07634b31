"""`JobStore`: all jobs with their states, and the deliveries that led to the jobs.

The store starts no process; `jobs/runner.py` takes jobs from the store and runs them.
"""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Self

from sqlalchemy import Connection, select

from jobs.errors import JobNotFound, OlderSchema
from jobs.job import Delivery, Job, JobRequest, Submission, delivery_ids
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
    """Several threads and processes may use the store at the same time, except for `changed`. If
    the database fails, every method raises StoreError.

    Every method is one transaction, so a method that fails changes nothing. There are two
    exceptions: `forget` and `replace_reasons` use several transactions.
    """

    @classmethod
    def open(cls, url_or_path: str | Path, *, clock: Callable[[], float] | None = None) -> Self:
        """Open the store; first create or upgrade it if necessary. Raises NewerSchema if a newer
        release wrote the store.

        Without a `clock`, the times of a Postgres store come from the Postgres server, because the
        clocks of its clients may differ. The times of a SQLite store come from this machine.
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
        """Record `delivery` and submit `spec`; the store does both or neither. Returns the job that
        now answers for the delivery:

        - If `delivery` was seen before, the job to which it led. If that job failed or was
          cancelled, the pipeline's job of a later push. If there is no such job, or if the delivery
          was ignored before, the cases below apply.
        - If the pipeline's latest job has the same `dedupe_key`, that job, unless it failed or was
          cancelled.
        - If the pipeline has a pending job of pushes, that job. It absorbs `spec`: it takes the
          command, settings and payload of `spec`, and keeps the start of its own range. If the
          commits of `spec` are older, the pending job keeps its command, settings and payload.
        - In all other cases, a new pending job.

        A submission by hand (`by_hand`) leads to a new job, even if the `dedupe_key` is known. That
        job absorbs no push, and no other job absorbs it. Raises PendingJob if a job that was
        submitted by hand is already pending for the pipeline.
        """
        request = JobRequest(spec=spec, payload=payload, delivery=delivery, by_hand=by_hand)
        return self.submit_all([request])[0]

    def submit_all(self, requests: Sequence[JobRequest]) -> list[Submission]:
        """Submit the requests in order, each in the same way as `submit`. The store takes all of
        them or none."""
        with writing(self._engine) as connection:
            return submit_all(connection, requests, self._now(connection))

    def ignore(self, delivery: Delivery, reason: str) -> None:
        """Record that `delivery` leads to no job, unless the delivery already has an answer."""
        with writing(self._engine) as connection:
            insert_ignored(connection, delivery, self._now(connection), reason)

    # What a runner does

    def claim(self, owner: str, lease_seconds: float) -> Job | None:
        """Lease to `owner` the pending job that has been due longest. The job is then RUNNING.

        Returns None if no pending job is due, or if every due job waits for the running job of its
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

    def started(self, job_id: str, owner: str, handle: str, *, waited_seconds: float = 0.0) -> None:
        """Record the launcher's handle of the attempt, and that the job waited `waited_seconds` for
        this attempt. Raises LeaseLost."""
        with writing(self._engine) as connection:
            fetch_leased(connection, job_id, owner)
            started_at = JOBS.c.started_at + waited_seconds
            update_job(connection, job_id, handle=handle, started_at=started_at)

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

    def retry(self, job_id: str, owner: str, failed: JobOutcome, wait_seconds: float = 0.0) -> Job:
        """Plan the next attempt of a job whose attempt was lost or failed, or end the job with the
        outcome `failed`.

        The job ends if this was the last of its `max_attempts`. A job of pushes also ends if
        another job of pushes is pending; that job then takes over the commits. Returns the job,
        which is RUNNING or has ended. Raises LeaseLost.
        """
        with writing(self._engine) as connection:
            job = fetch_leased(connection, job_id, owner)
            now = self._now(connection)
            job = update_job(connection, job_id, num_lost=job.num_lost + 1)
            if (ended := _give_way(connection, job, failed, now)) is not None:
                return ended
            if job.num_lost >= job.spec.max_attempts:
                last = f"That was attempt {job.num_lost} of {job.spec.max_attempts}."
                return end_job(connection, job, _because(failed, last), now)
            return update_job(
                connection,
                job_id,
                attempt=job.attempt + 1,
                handle=None,
                run_after=now + wait_seconds,
            )

    def give_way(self, job_id: str, owner: str, failed: JobOutcome) -> Job:
        """End a job that waits for its next attempt, if a pending job of pushes can take over the
        commits. Returns the job, which is RUNNING or has ended. Raises LeaseLost."""
        with writing(self._engine) as connection:
            job = fetch_leased(connection, job_id, owner)
            return _give_way(connection, job, failed, self._now(connection)) or job

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
        """Lease to `owner` each RUNNING job that another runner had, if the lease of that job has
        run out. Returns these jobs."""
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
                    connection,
                    job_id_of(number),
                    owner=owner,
                    lease_until=now + lease_seconds,
                    # The job had no runner since its lease ran out. Move its start by that time, so
                    # that it does not count against the job's time limit.
                    started_at=JOBS.c.started_at + (now - JOBS.c.lease_until),
                )
                for number in numbers
            ]

    # What keeps the store small

    def forget(self, before: float, *, newest: int, kept: Collection[str] = ()) -> Sequence[str]:
        """Delete the jobs that ended before the time `before`, with their deliveries. Returns the
        ids of the deleted jobs.

        The `newest` jobs of each pipeline are not deleted, and the jobs in `kept` are not deleted.
        Deliveries that led to no job are also deleted, if they were received before `before`. If a
        deleted delivery is repeated, it counts as a new delivery.
        """
        forget_ignored(self._engine, before)
        return forget_jobs(self._engine, before, newest=newest, kept=kept)

    def replace_reasons(self, job_ids: Collection[str], reason: str) -> None:
        """Replace the reason in the outcomes of these jobs, because a reason may quote rows that
        must be deleted. An outcome without a reason stays as it is."""
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
        """End a pending job, or ask the runner of a running job to stop it. A job that has ended
        stays as it is.

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


def _give_way(connection: Connection, job: Job, failed: JobOutcome, now: float) -> Job | None:
    successor = fetch_successor(connection, job)
    if successor is None:
        return None
    return end_job(
        connection, job, _because(failed, f"{successor.id} takes over its commits."), now
    )


def _because(failed: JobOutcome, why_no_more: str) -> JobOutcome:
    """The outcome of the last attempt, as the outcome of the job. `why_no_more` says why there is
    no further attempt."""
    reason = " ".join(filter(None, (failed.reason, why_no_more)))
    return failed.model_copy(update={"reason": reason, "may_pass": False})
