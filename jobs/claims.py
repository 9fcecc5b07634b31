"""Chooses the job that a runner takes next: `Claims.claim` does the work of `JobStore.claim`."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection, Engine, select

from jobs.errors import HeadAway, NoHead
from jobs.job import FindHead, Head, Job, delivery_ids, failure
from jobs.outcome import JobOutcome
from jobs.rows import (
    end_job,
    fetch_job,
    give_way,
    is_paused,
    job_from_row,
    number_of,
    select_jobs,
    spec_as_json,
    update_job,
    with_revisions,
)
from jobs.schema import JOBS, reading, writing

HEAD_RETRY_SECONDS = 5.0
"""If the head of a job's ref cannot be read, it is read again after this time."""


class Claims:
    """`now` returns the store's time."""

    def __init__(self, engine: Engine, now: Callable[[Connection], float]) -> None:
        self._engine = engine
        self._now = now

    def claim(self, owner: str, lease_seconds: float, find_head: FindHead | None) -> Job | None:
        if (again := self._claim_again(owner, lease_seconds)) is not None:
            return again
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

    def _claim_again(self, owner: str, lease_seconds: float) -> Job | None:
        with reading(self._engine) as connection:
            due = is_waiting() & ((JOBS.c.run_after <= self._now(connection)) | gives_way())
            query = select(JOBS.c.number).where(due).order_by(JOBS.c.run_after, JOBS.c.number)
            number = connection.scalar(query.limit(1))
        if number is None:
            return None
        with writing(self._engine) as connection:
            # Check again under the write lock.
            job = next(
                iter(select_jobs(connection, select(JOBS).where(due, JOBS.c.number == number))),
                None,
            )
            if job is None:
                return None
            now = self._now(connection)
            if job.last_failure is not None:
                ended = give_way(connection, job, job.last_failure, now)
                if ended is not None:
                    return ended
            return update_job(
                connection,
                job.id,
                owner=owner,
                lease_until=now + lease_seconds,
                outcome=None,
                # The time without an attempt does not count against the job's time limit.
                started_at=JOBS.c.started_at + (now - JOBS.c.lease_until),
            )

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


def previous_head(connection: Connection, job: Job) -> str | None:
    """The commit of the pipeline's last push job that has one. None if there is no such job."""
    query = select(JOBS.c.head).where(
        JOBS.c.pipeline == job.spec.pipeline,
        JOBS.c.by_hand.is_(False),
        JOBS.c.head.is_not(None),
        JOBS.c.number < number_of(job.id),
    )
    head: str | None = connection.scalar(query.order_by(JOBS.c.number.desc()).limit(1))
    return head


def job_that_trained(connection: Connection, job: Job, head: Head) -> Job | None:
    """The newest ended job of the pipeline, if it has trained `head` in the same way as `job`
    would: with the same settings and the same command. Otherwise None.

    Older jobs do not count. Suppose that somebody pushes the commits A, B and again A. The third
    push needs a training, because the weights have learned B since the first.
    """
    query = select(JOBS).where(JOBS.c.pipeline == job.spec.pipeline, JOBS.c.ended_at.is_not(None))
    # Do not order by `ended_at`: the clock may have been set back.
    row = connection.execute(query.order_by(JOBS.c.number.desc()).limit(1)).one_or_none()
    if row is None or (row.state, row.head) != ("COMPLETED", head.sha):
        return None
    last = job_from_row(row)
    is_same = (last.spec.settings, last.spec.command) == (job.spec.settings, job.spec.command)
    return last if is_same else None


def is_claimable() -> Any:
    """The SQL condition for pending jobs that need not wait for another job: no other job of the
    same pipeline is running, and the pipeline is not paused. (Plain commands have no pipeline, so
    they block nobody.) The condition does not check whether the time `run_after` has come."""
    running = JOBS.alias("running")
    blocked = (
        select(running.c.number)
        .where(running.c.pipeline == JOBS.c.pipeline, running.c.state == "RUNNING")
        .exists()
    )
    return (JOBS.c.state == "SCHEDULING") & ~blocked & (JOBS.c.pipeline.is_(None) | ~is_paused())


def is_waiting() -> Any:
    """The SQL condition for jobs that have been started and wait for their next attempt."""
    return (JOBS.c.state == "RUNNING") & JOBS.c.owner.is_(None)


def gives_way() -> Any:
    """The SQL condition for push jobs of which an attempt has failed, while a push job of the
    pipeline is pending (`fetch_successor`)."""
    newer = JOBS.alias("newer")
    successor = select(newer.c.number).where(
        newer.c.pipeline == JOBS.c.pipeline,
        newer.c.state == "SCHEDULING",
        newer.c.by_hand.is_(False),
    )
    return JOBS.c.by_hand.is_(False) & JOBS.c.outcome.is_not(None) & successor.exists()
