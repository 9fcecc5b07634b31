"""`JobStore`: all jobs with their states, and all deliveries, also those that led to no job.

The store starts no process; `jobs/runner.py` takes jobs from the store and runs them.

A *push job* belongs to a pipeline and was not submitted by hand. The docstring of the package
`jobs` explains the other terms, such as "plain command" and "lost".
"""

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from sqlalchemy import ColumnElement, Connection, case, delete, insert, select

from jobs.errors import HeadAway, JobNotFound, NoHead
from jobs.job import Delivery, FindHead, Head, Job, JobRequest, Submission, delivery_ids, failure
from jobs.migrations import check_schema, migrate
from jobs.outcome import JobOutcome
from jobs.reader import JobReader
from jobs.retention import forget_ignored, forget_jobs
from jobs.rows import (
    end_job,
    fetch_job,
    fetch_leased,
    fetch_successor,
    is_claimable,
    job_id_of,
    job_that_trained,
    number_of,
    previous_head,
    select_jobs,
    spec_as_json,
    update_job,
    with_revisions,
)
from jobs.schema import JOBS, PAUSES, connect, file_of, reading, writing
from jobs.spec import JobSpec
from jobs.submissions import submit_all

__all__ = ["Delivery", "JobRequest", "JobStore", "Submission"]

HEAD_RETRY_SECONDS = 5.0
"""If the head of a job's ref cannot be read, it is read again after this time."""


class JobStore(JobReader):
    """Several threads and processes may use the store at the same time, but only one thread may
    call `changed`. Every method raises StoreError if the database fails.

    A method that fails has changed nothing, because each method is one transaction. There are two
    exceptions. `forget` and `replace_reasons` use several transactions, so they may have done a
    part of their work when they fail. And if the connection to Postgres breaks during a commit, the
    method raises StoreError, but the change may be stored.
    """

    @classmethod
    def open(cls, url_or_path: str | Path, *, clock: Callable[[], float] | None = None) -> Self:
        """Open the store. Create its tables if necessary. Raises OtherSchema if another version of
        hotpush wrote the store.

        `clock` returns seconds since the epoch. Without a `clock`, a SQLite store uses the clock of
        this machine. A Postgres store uses the clock of the Postgres server, because the machines
        that use this server may have different clocks.
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
        """Open the store without creating anything. Returns None if the store has no tables yet.

        Raises OtherSchema if another version of hotpush wrote the store.
        """
        engine = connect(url_or_path, only_reads=True)
        try:
            revision = check_schema(engine)
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
        """Submit `spec` and record `delivery`, in one transaction. Returns the job to which the
        submission leads. The store goes through these rules in order, and the first rule that
        applies decides:

        1. If the store has recorded a job for `delivery`, and this job neither failed nor was
           cancelled, return this job.
        2. If the pipeline has a pending push job, link the delivery to this job, give it the
           command and the settings of `spec`, and return it.
        3. Create a pending job, and return it.

        The commit in the range of a push job's `spec` is the one that the delivery announced. The
        job does not train on it: the job gets its commit, which is the head of the ref, when a
        runner takes it (`claim`). So the order of deliveries does not matter.

        For a submission by hand (`by_hand`), only rules 1 and 3 apply. Raises PendingJob if the
        pipeline already has a pending job that was submitted by hand.
        """
        request = JobRequest(spec=spec, payload=payload, delivery=delivery, by_hand=by_hand)
        return self.submit_all([request])[0]

    def submit_all(
        self, requests: Sequence[JobRequest], *, ignored: Sequence[tuple[Delivery, str]] = ()
    ) -> list[Submission]:
        """Submit the requests in order, by the rules of `submit`. In the same transaction, record
        each delivery of `ignored` with the reason why it leads to no job. If such a delivery is
        already recorded, its record does not change."""
        with writing(self._engine) as connection:
            return submit_all(connection, requests, ignored, self._now(connection))

    # What a runner does

    def follow_file(self) -> bool:
        """Whether the SQLite file was replaced or deleted since the last call or, at the first
        call, since the store was opened. All methods use the file that is there now. This method
        creates the tables of that file if necessary, as `open` does."""
        if file_of(self._engine) == self._file:
            return False
        migrate(self._engine)
        self._file = file_of(self._engine)
        return True

    def claim(
        self, owner: str, lease_seconds: float, find_head: FindHead | None = None
    ) -> Job | None:
        """Choose the pending job that has been due for the longest time, and give its lease to the
        runner `owner`. The job is then RUNNING.

        If the job is for the head of a ref, `find_head` reads the head now; without `find_head`,
        the job must read the head itself. In three cases, the job is not RUNNING afterwards:

        - The head cannot be read now (HeadAway). The job stays pending for HEAD_RETRY_SECONDS, and
          this method returns None.
        - The ref has no head (NoHead). The job has failed.
        - The pipeline's newest ended job has trained this head in the same way
          (`job_that_trained`). The job has ended as `unchanged`.

        Returns None if no pending job is due, or if every due job waits for the running job of its
        pipeline, or for the end of a pause.
        """
        while (job := self._due()) is not None:
            head, failed = None, None
            try:
                if job.trains_head and find_head is not None:
                    head = find_head(job)
            except HeadAway as away:
                self._wait_for_head(job, str(away))
                return None
            except NoHead as error:
                failed = failure(job, stage="claim", reason=str(error))
            claimed = self._take(job, owner, lease_seconds, head, failed)
            if claimed is not None:
                return claimed
        return None

    def _due(self) -> Job | None:
        """The job that `claim` tries to take, with `old_sha` in its range."""
        with reading(self._engine) as connection:
            due = select(JOBS).where(is_claimable(), JOBS.c.run_after <= self._now(connection))
            due = due.order_by(JOBS.c.run_after, JOBS.c.number).limit(1)
            job = next(iter(select_jobs(connection, due)), None)
            if job is None or not job.trains_head:
                return job
            old_sha = previous_head(connection, job)
            return replace(job, spec=with_revisions(job.spec, old_sha=old_sha))

    def _wait_for_head(self, job: Job, reason: str) -> None:
        with writing(self._engine) as connection:
            if fetch_job(connection, number_of(job.id)).state == "SCHEDULING":
                run_after = self._now(connection) + HEAD_RETRY_SECONDS
                update_job(connection, job.id, run_after=run_after, waits_for=reason)

    def _take(
        self,
        job: Job,
        owner: str,
        lease_seconds: float,
        head: Head | None,
        failed: JobOutcome | None,
    ) -> Job | None:
        """Give the lease of the pending job to `owner`. None if the job cannot be taken any more,
        or if a delivery has arrived since the job was read: the head may be older than that."""
        with writing(self._engine) as connection:
            now = self._now(connection)
            still_due = select(JOBS).where(
                is_claimable(), JOBS.c.run_after <= now, JOBS.c.number == number_of(job.id)
            )
            found = next(iter(select_jobs(connection, still_due)), None)
            if found is None or delivery_ids(found) != delivery_ids(job):
                return None
            values: dict[str, Any] = {}
            if head is not None:
                spec = with_revisions(job.spec, new_sha=head.sha)
                payload = job.payload if job.by_hand and job.payload is not None else head.payload
                values = {
                    "spec": spec_as_json(spec),
                    "payload": json.dumps(payload),
                    "head": head.sha,
                }
            claimed = update_job(
                connection,
                job.id,
                state="RUNNING",
                attempt=1,
                started_at=now,
                owner=owner,
                lease_until=now + lease_seconds,
                waits_for=None,
                **values,
            )
            if failed is not None:
                return end_job(connection, claimed, failed, now)
            if head is None or job.by_hand:
                return claimed
            last = job_that_trained(connection, claimed, head)
            if last is None:
                return claimed
            result = last.outcome.result if last.outcome is not None else "completed"
            unchanged = JobOutcome(
                result="unchanged",
                stage="claim",
                reason=f"{last.id} has trained on {head.sha[:12]} already: {result}.",
                delivery_ids=delivery_ids(claimed),
                job_id=job.id,
                dataset_revision=head.sha,
            )
            return end_job(connection, claimed, unchanged, now)

    def started(self, job_id: str, owner: str, handle: str, *, waited_seconds: float = 0.0) -> None:
        """Record that the attempt was started. `handle` is the launcher's name for the attempt.
        Before this attempt, the job waited for `waited_seconds`; this time does not count against
        the job's time limit. Raises LeaseLost."""
        with writing(self._engine) as connection:
            fetch_leased(connection, job_id, owner)
            started_at = JOBS.c.started_at + waited_seconds
            update_job(connection, job_id, handle=handle, started_at=started_at)

    def heartbeat(self, job_id: str, owner: str, lease_seconds: float) -> bool:
        """Extend the lease. Returns True if somebody asked to cancel the job. Raises LeaseLost.

        A lease that has run out is extended too, unless another runner has adopted the job.
        """
        with writing(self._engine) as connection:
            job = fetch_leased(connection, job_id, owner)
            update_job(connection, job_id, lease_until=self._now(connection) + lease_seconds)
            return job.cancel_requested

    def finish(self, job_id: str, owner: str, outcome: JobOutcome | None) -> Job:
        """End the job. An `outcome` of None means that the command exited with 0 and wrote no
        outcome. Raises LeaseLost.
        """
        with writing(self._engine) as connection:
            job = fetch_leased(connection, job_id, owner)
            return end_job(connection, job, outcome, self._now(connection))

    def retry(self, job_id: str, owner: str, failed: JobOutcome, wait_seconds: float = 0.0) -> Job:
        """Plan the next attempt of a job whose last attempt was lost or failed for a temporary
        cause. `failed` is the outcome of the last attempt. The next attempt may start after
        `wait_seconds`.

        In two cases, the job gets no further attempt and ends with the outcome `failed`:
        `max_attempts` attempts were lost or failed for a temporary cause, or a push job of the
        pipeline is pending, which trains on the newest commit. Returns the job, which is RUNNING or
        has ended. Raises LeaseLost.
        """
        with writing(self._engine) as connection:
            job = fetch_leased(connection, job_id, owner)
            now = self._now(connection)
            job = update_job(connection, job_id, num_lost=job.num_lost + 1)
            if (ended := _give_way(connection, job, failed, now)) is not None:
                return ended
            if job.num_lost >= job.spec.max_attempts:
                # Count the failed attempts only. An attempt that ended because its runner was
                # stopped has a number too, but it did not fail.
                last = f"That was failed attempt {job.num_lost} of {job.spec.max_attempts}."
                return end_job(connection, job, _final_failure(failed, last), now)
            return update_job(
                connection,
                job_id,
                attempt=job.attempt + 1,
                handle=None,
                run_after=now + wait_seconds,
            )

    def give_way(self, job_id: str, owner: str, failed: JobOutcome) -> Job:
        """End this push job if a push job of the pipeline is pending. `failed` is the outcome of
        the last attempt, and becomes the outcome of this job. Returns this job, which is RUNNING or
        has ended. Raises LeaseLost."""
        with writing(self._engine) as connection:
            job = fetch_leased(connection, job_id, owner)
            return _give_way(connection, job, failed, self._now(connection)) or job

    def release(self, job_id: str, owner: str, *, waited_seconds: float = 0.0) -> None:
        """Give up the lease of a job, so that another runner can adopt the job at once and start a
        new attempt. Call this method only when no process of the job runs.

        If the job was waiting for its next attempt, `waited_seconds` says how long it has waited.
        This time does not count against the job's time limit. Raises LeaseLost.
        """
        with writing(self._engine) as connection:
            fetch_leased(connection, job_id, owner)
            update_job(
                connection,
                job_id,
                handle=None,
                owner=None,
                lease_until=self._now(connection),
                started_at=JOBS.c.started_at + waited_seconds,
            )

    def adopt(
        self, owner: str, lease_seconds: float, *, held: Collection[str] | None = None
    ) -> list[Job]:
        """Find the RUNNING jobs whose leases have run out or were given up. Give these leases to
        the runner `owner`, and return these jobs.

        `held` lists the ids of the jobs that the runner `owner` knows to be its own. `owner` adopts
        none of these jobs, unless another runner has taken the job's lease since then. But the
        store may have more jobs of `owner`: if the store failed just after it had stored the lease,
        the runner never got the job. `owner` adopts such a job too. If `held` is None, `owner`
        adopts only jobs of other runners.

        If a job has no handle, the last runner may have started its attempt nevertheless, or may
        still start it. So the job gets a new attempt, and the token of the earlier attempt is no
        longer valid. With a handle, the job's process was started once, and the attempt goes on.
        """
        may_be_adopted: ColumnElement[bool] = JOBS.c.owner.is_distinct_from(owner)
        if held is not None:
            may_be_adopted |= JOBS.c.number.not_in([number_of(job_id) for job_id in held])
        with writing(self._engine) as connection:
            now = self._now(connection)
            numbers = connection.scalars(
                select(JOBS.c.number)
                .where(
                    JOBS.c.state == "RUNNING",
                    JOBS.c.lease_until <= now,
                    may_be_adopted,
                )
                .order_by(JOBS.c.number)
            ).all()
            return [
                update_job(
                    connection,
                    job_id_of(number),
                    owner=owner,
                    lease_until=now + lease_seconds,
                    attempt=case(
                        (JOBS.c.handle.is_(None), JOBS.c.attempt + 1), else_=JOBS.c.attempt
                    ),
                    # The job has had no runner since its lease ran out. The time without a runner
                    # does not count against the job's time limit. So add this time to `started_at`.
                    started_at=JOBS.c.started_at + (now - JOBS.c.lease_until),
                )
                for number in numbers
            ]

    def handled(self, job_id: str) -> None:
        """Record that the handlers of outcomes have got the outcome of this job, so that
        `unhandled` leaves the job out."""
        with writing(self._engine) as connection:
            update_job(connection, job_id, handled_at=self._now(connection))

    # Deleting old jobs and reasons

    def forget(self, before: float, *, newest: int, kept: Collection[str] = ()) -> Sequence[str]:
        """Delete the jobs that ended earlier than the time `before`, and the deliveries of these
        jobs. Returns the ids of the deleted jobs.

        Three groups of jobs are not deleted: the jobs in `kept`, the last `newest` jobs of each
        pipeline, and the last `newest` plain commands. This method also deletes the deliveries that
        led to no job and were received earlier than the time `before`. If a sender repeats a
        deleted delivery, the delivery counts as new.
        """
        forget_ignored(self._engine, before)
        return forget_jobs(self._engine, before, newest=newest, kept=kept)

    def replace_reasons(self, job_ids: Collection[str], reason: str) -> None:
        """Replace the reasons in the outcomes of these jobs. Call this when rows of a dataset must
        be deleted everywhere: the reason of a job may quote such rows. An outcome without a reason
        does not change, and an unknown job id is skipped."""
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

    def pause(self, pipeline: str) -> bool:
        """Start no push job of this pipeline until `resume` is called. Returns False if the
        pipeline was paused already."""
        with writing(self._engine) as connection:
            if connection.scalar(select(PAUSES).where(PAUSES.c.pipeline == pipeline)) is not None:
                return False
            values = {"pipeline": pipeline, "since": self._now(connection)}
            connection.execute(insert(PAUSES).values(**values))
            return True

    def resume(self, pipeline: str) -> bool:
        """End a pause. Returns False if the pipeline was not paused."""
        with writing(self._engine) as connection:
            ended = connection.execute(delete(PAUSES).where(PAUSES.c.pipeline == pipeline))
            return ended.rowcount > 0

    def cancel(self, job_id: str) -> Job:
        """Cancel the job. If the job is pending, end it. If the job is running, ask its runner to
        stop it. If the job has already ended, change nothing.

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
        connection, job, _final_failure(failed, f"{successor.id} trains on the newest commit."), now
    )


def _final_failure(failed: JobOutcome, why_no_more: str) -> JobOutcome:
    """The outcome of a job, made from the outcome of its last attempt. `why_no_more` says why there
    is no further attempt."""
    reason = " ".join(filter(None, (failed.reason, why_no_more)))
    return failed.model_copy(update={"reason": reason, "may_pass": False})
