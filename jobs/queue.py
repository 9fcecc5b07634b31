"""Decides which job a submission leads to, which job a runner takes next, and which old jobs are
deleted. It does the work of `JobStore.submit`, `JobStore.claim` and `JobStore.forget`.

A *push job* belongs to a pipeline and was not submitted by hand. It trains the head of its ref. So
a delivery only marks the pipeline as behind: it is linked to the pipeline's pending push job, and
the order in which deliveries arrive does not matter.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from sqlalchemy import Connection, Engine, delete, func, insert, select, update

from jobs.database import reading, writing
from jobs.errors import HeadAway, JobNotFound, NoHead, PendingJob
from jobs.job import (
    ENDED_STATES,
    OPEN_STATES,
    Delivery,
    FindHead,
    Head,
    Job,
    JobRequest,
    delivery_ids,
    outcome_of,
)
from jobs.outcome import JobOutcome
from jobs.schema import (
    DELIVERIES,
    JOBS,
    end_job,
    fetch_job,
    is_job_id,
    is_paused,
    is_pending,
    job_from_row,
    job_id_of,
    matches_delivery,
    number_of,
    select_jobs,
    spec_as_json,
    update_job,
    with_revisions,
)
from jobs.spec import LOCAL, JobSpec

HEAD_RETRY_SECONDS = 5.0
"""If the head of a job's ref cannot be read, it is read again after this time."""

KEPT_SECONDS = 7 * 86400.0
"""`forget_jobs` keeps the jobs that it is told to keep for this long, also if it is then called on
another machine, which may not know of the releases that need them."""

BATCH = 100
"""One transaction deletes at most this many jobs, with all their deliveries."""


def submit_all(connection: Connection, requests: Sequence[JobRequest], now: float) -> list[Job]:
    """Submit the requests in order, by the rules of `JobStore.submit`. Raises PendingJob if a
    request is by hand, and the pipeline already has a pending job that was submitted by hand."""
    batch = _Batch(connection, now)
    known = _known_deliveries(connection, [each.delivery for each in requests if each.delivery])
    answers = dict(known)
    new: dict[Delivery, dict[str, Any]] = {}
    jobs = []
    for request in requests:
        delivery = request.delivery
        if delivery is None:
            jobs.append(batch.submit(request))
            continue
        job = batch.job(answers[delivery]) if delivery in answers else None
        if job is not None and not _failed_or_cancelled(job):
            jobs.append(job)
            continue
        jobs.append(batch.submit(request))
        answers[delivery] = number_of(jobs[-1].id)
        if delivery not in known:
            revisions = request.spec.revisions
            new[delivery] = {
                "source": delivery.source,
                "id": delivery.id,
                "announced": None if revisions is None else revisions.new_sha,
                "received_at": now,
                "job_number": answers[delivery],
            }
    batch.write()
    if new:
        arrived = connection.scalar(select(func.max(DELIVERIES.c.arrival))) or 0
        rows = [{**row, "arrival": at} for at, row in enumerate(new.values(), start=arrived + 1)]
        connection.execute(insert(DELIVERIES), rows)
    # The recorded job failed or was cancelled.
    for delivery in [each for each in known if answers[each] != known[each]]:
        answer = update(DELIVERIES).where(*matches_delivery(delivery.source, delivery.id))
        connection.execute(answer.values(job_number=answers[delivery]))
    return jobs


def due_at(spec: JobSpec, first_seen: float, now: float) -> float:
    """When a pending job may start. Its first delivery arrived at the time `first_seen`, and its
    last one at the time `now`. All times are seconds since the epoch."""
    return min(first_seen + spec.max_wait_seconds, now + spec.debounce_seconds)


def _known_deliveries(
    connection: Connection, deliveries: Sequence[Delivery]
) -> Mapping[Delivery, int]:
    """The deliveries that the store has already recorded: delivery → number of its job."""
    ids: defaultdict[str, list[str]] = defaultdict(list)
    for delivery in deliveries:
        ids[delivery.source].append(delivery.id)
    known = {}
    # Use one query per source. With a list of (source, id) pairs, SQLite would not use the index
    # and would compare every row.
    for source in ids:
        query = select(DELIVERIES.c.id, DELIVERIES.c.job_number)
        is_asked = DELIVERIES.c.source == source, DELIVERIES.c.id.in_(ids[source])
        for row in connection.execute(query.where(*is_asked)):
            known[Delivery(source=source, id=row.id)] = row.job_number
    return known


class _Batch:
    """The submissions of one transaction. New jobs are inserted at once. A pending push job gets
    its changes only once, by `write`, because one transaction may have many deliveries for it."""

    def __init__(self, connection: Connection, now: float) -> None:
        self._connection = connection
        self._now = now
        self._pending: dict[str, Job] = {}
        """Pipeline → its pending push job, with the changes that are not written yet."""

    def submit(self, request: JobRequest) -> Job:
        spec = request.spec
        pipeline = spec.pipeline
        if pipeline is None or request.by_hand:
            if pipeline is not None and (other := self._find(is_pending(pipeline, by_hand=True))):
                raise PendingJob(other.id, pipeline)
            return self._insert(request)
        spec = with_revisions(spec, old_sha=None, new_sha=None, delivery_ids=())
        pending = self._pending.get(pipeline) or self._find(is_pending(pipeline, by_hand=False))
        if pending is None:
            job = self._insert(replace(request, spec=spec))
        else:
            if spec.revisions is None:
                spec = spec.model_copy(update={"revisions": pending.spec.revisions})
            run_after = due_at(spec, pending.created_at, self._now)
            job = replace(pending, spec=spec, payload=request.payload, run_after=run_after)
        self._pending[pipeline] = job
        return job

    def job(self, number: int) -> Job:
        """The job, with the changes that this batch has made so far."""
        for job in self._pending.values():
            if number_of(job.id) == number:
                return job
        if (found := self._find(JOBS.c.number == number)) is None:
            raise JobNotFound(job_id_of(number))
        return found

    def write(self) -> None:
        for job in self._pending.values():
            self._connection.execute(
                update(JOBS)
                .where(JOBS.c.number == number_of(job.id))
                .values(
                    spec=spec_as_json(job.spec),
                    is_local=job.spec.launcher == LOCAL,
                    run_after=job.run_after,
                    payload=_as_json(job.payload),
                )
            )

    def _find(self, condition: Any) -> Job | None:
        row = self._connection.execute(select(JOBS).where(condition)).one_or_none()
        return None if row is None else job_from_row(row)

    def _insert(self, request: JobRequest) -> Job:
        spec = request.spec
        row = self._connection.execute(
            insert(JOBS)
            .values(
                pipeline=spec.pipeline,
                head=None if spec.revisions is None else spec.revisions.new_sha,
                state="SCHEDULING",
                spec=spec_as_json(spec),
                payload=_as_json(request.payload),
                created_at=self._now,
                run_after=due_at(spec, self._now, self._now),
                attempt=0,
                num_lost=0,
                cancel_requested=False,
                by_hand=request.by_hand,
                is_local=spec.launcher == LOCAL,
            )
            .returning(*JOBS.c)
        ).one()
        return job_from_row(row)


def _failed_or_cancelled(job: Job) -> bool:
    """Whether the job failed, was cancelled, or still runs but will be cancelled. If the sender
    repeats a delivery of such a job, the pipeline is behind again. A job that completed before it
    could be cancelled does not count as cancelled, because it has done its work."""
    return job.state in ("ERROR", "CANCELED") or (job.cancel_requested and not job.has_ended)


def _as_json(payload: dict[str, Any] | None) -> str | None:
    return None if payload is None else json.dumps(payload)


# Claims


Clock = Callable[[Connection], float]
"""Returns the store's time."""


def claim_job(
    engine: Engine,
    clock: Clock,
    owner: str,
    lease_seconds: float,
    find_head: FindHead | None,
    is_local: bool | None,
) -> Job | None:
    """See `JobStore.claim`."""
    with reading(engine) as connection:
        job = _due(connection, clock(connection), is_local)
    if job is None:
        return None
    head, failed = None, None
    try:
        if job.state == "SCHEDULING" and job.needs_head and find_head is not None:
            head = find_head(job)
    except HeadAway as away:
        with writing(engine) as connection:
            if fetch_job(connection, number_of(job.id)).state == "SCHEDULING":
                run_after = clock(connection) + HEAD_RETRY_SECONDS
                update_job(connection, job.id, run_after=run_after, waits_for=str(away))
        return None
    except NoHead as error:
        failed = outcome_of(job, "failed", stage="claim", reason=str(error))
    with writing(engine) as connection:
        now = clock(connection)
        # Check again under the write lock.
        is_it = JOBS.c.number == number_of(job.id), JOBS.c.state == job.state
        still_due = select(JOBS).where(_is_due(now), *is_it)
        found = next(iter(select_jobs(connection, still_due, may_wait=False)), None)
        if found is None:
            return None
        lease = {"owner": owner, "lease_until": now + lease_seconds}
        if found.state == "RUNNING":
            return _take_again(connection, found, lease, now)
        return _take(connection, job, found, lease, head, failed, now)


def _is_due(now: float) -> Any:
    """The SQL condition for pending jobs that may start, and for jobs that wait for their next
    attempt, if the attempt is due or they give way."""
    is_due = JOBS.c.run_after <= now
    gives_way = JOBS.c.outcome.is_not(None) & successor().is_not(None)
    return (is_claimable() & is_due) | (is_waiting() & (is_due | gives_way))


def _due(connection: Connection, now: float, is_local: bool | None) -> Job | None:
    """The job that `claim_job` tries to take, with `old_sha` in its range."""
    # The database finds the states by an index.
    due = select(JOBS).where(JOBS.c.state.in_(OPEN_STATES), _is_due(now))
    if is_local is not None:
        due = due.where(JOBS.c.is_local.is_(is_local))
    # By the state, because `RUNNING` comes before `SCHEDULING`.
    first = due.order_by(JOBS.c.state, JOBS.c.run_after, JOBS.c.number).limit(1)
    job = next(iter(select_jobs(connection, first, may_wait=False)), None)
    if job is None or not job.needs_head:
        return job
    old_sha = previous_head(connection, job)
    return replace(job, spec=with_revisions(job.spec, old_sha=old_sha))


def _take_again(connection: Connection, job: Job, lease: dict[str, Any], now: float) -> Job:
    """Give the lease of the next attempt, unless the job gives way."""
    if job.last_failure is not None:
        ended = give_way(connection, job, job.last_failure, now)
        if ended is not None:
            return ended
    # The time without an attempt does not count against the job's time limit.
    started_at = JOBS.c.started_at + (now - JOBS.c.lease_until)
    return update_job(connection, job.id, outcome=None, started_at=started_at, **lease)


def _take(
    connection: Connection,
    job: Job,
    found: Job,
    lease: dict[str, Any],
    head: Head | None,
    failed: JobOutcome | None,
    now: float,
) -> Job:
    """Give the lease of the pending job. `job` is the job before the head was read, and `found` is
    the job now."""
    values: dict[str, Any] = {}
    if head is not None:
        spec = with_revisions(job.spec, new_sha=head.sha)
        payload = json.dumps(head.payload)
        values = {"spec": spec_as_json(spec), "payload": payload, "head": head.sha}
    claimed = update_job(
        connection,
        job.id,
        state="RUNNING",
        attempt=1,
        started_at=now,
        waits_for=None,
        **lease,
        **values,
    )
    late = set(delivery_ids(found)).difference(delivery_ids(job))
    if late:
        # The head may be older than these deliveries, so they get a new pending job. `submit` makes
        # one, because the job of before is not pending any more.
        request = JobRequest(spec=found.spec, payload=found.payload)
        later = number_of(_Batch(connection, now).submit(request).id)
        are_late = DELIVERIES.c.job_number == number_of(job.id), DELIVERIES.c.id.in_(late)
        connection.execute(update(DELIVERIES).where(*are_late).values(job_number=later))
        claimed = fetch_job(connection, number_of(job.id))
    if failed is not None:
        return end_job(connection, claimed, failed, now)
    if head is None or job.by_hand:
        return claimed
    last = job_that_trained(connection, claimed, head)
    if last is None:
        return claimed
    result = last.outcome.result if last.outcome is not None else "completed"
    reason = f"{last.id} has trained on {head.sha[:12]} already: {result}."
    unchanged = outcome_of(claimed, "unchanged", stage="claim", reason=reason)
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


@cache
def is_claimable() -> Any:
    """The SQL condition for pending jobs that need not wait: no other job of the same pipeline is
    running and, for a push job, the pipeline is not paused. (Plain commands have no pipeline, so
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


@cache
def successor() -> Any:
    """The SQL expression for the number of the push job that is pending while a push job of the
    same pipeline runs. It trains the head of the ref, so it covers the commits of the running job
    if that job fails. Null if no push job is pending, and for a job by hand."""
    pending = JOBS.alias("pending")
    return (
        select(pending.c.number)
        .where(
            JOBS.c.by_hand.is_(False),
            pending.c.pipeline == JOBS.c.pipeline,
            pending.c.state == "SCHEDULING",
            pending.c.by_hand.is_(False),
        )
        .correlate(JOBS)
        .scalar_subquery()
    )


def give_way(connection: Connection, job: Job, failed: JobOutcome, now: float) -> Job | None:
    """End this job if it has a `successor`. `failed` is the outcome of the last attempt. Returns
    the ended job; None if there is no successor."""
    number = connection.scalar(select(successor()).where(JOBS.c.number == number_of(job.id)))
    if number is None:
        return None
    why = f"{job_id_of(number)} trains on the newest commit."
    return end_job(connection, job, final_failure(failed, why), now)


def final_failure(failed: JobOutcome, why_no_more: str) -> JobOutcome:
    """The outcome of a job, made from the outcome of its last attempt. `why_no_more` says why there
    is no further attempt."""
    reason = " ".join(filter(None, (failed.reason, why_no_more)))
    return failed.model_copy(update={"reason": reason, "may_pass": False})


# Deleting old jobs


def forget_jobs(
    engine: Engine, clock: Clock, before: float, kept: Collection[str]
) -> Sequence[str]:
    """See `JobStore.forget`. Searches without the store's write lock, and deletes in small
    transactions, so that submissions never wait long for the lock."""
    with writing(engine) as connection:
        # A manifest of somebody's own trainer may name anything.
        numbers = [number_of(each) for each in kept if is_job_id(each)]
        is_kept = JOBS.c.number.in_(numbers), JOBS.c.ended_at < before
        until = clock(connection) + KEPT_SECONDS
        connection.execute(update(JOBS).where(*is_kept).values(lease_until=until))
    with reading(engine) as connection:
        deleted = list(connection.scalars(_old_jobs(before, clock(connection))))
    for start in range(0, len(deleted), BATCH):
        numbers = deleted[start : start + BATCH]
        with writing(engine) as connection:
            connection.execute(delete(DELIVERIES).where(DELIVERIES.c.job_number.in_(numbers)))
            connection.execute(delete(JOBS).where(JOBS.c.number.in_(numbers)))
    return [job_id_of(number) for number in deleted]


def _old_jobs(before: float, now: float) -> Any:
    """The query for the numbers of the jobs that ended before the time `before`, lowest first.
    Leaves out those that are kept."""
    # The condition on `ended_at` alone would select the right jobs, but there is no index on
    # `ended_at`, so the database would read all jobs that have ended. The condition on `run_after`
    # makes the database use an index. A job normally ends after its `run_after`. So if `ended_at`
    # is smaller than `before`, `run_after` normally is smaller too, and the query finds the job.
    # There is one exception: a job that ended while it waited for its first or its next attempt may
    # have ended before its `run_after`. Such a job is deleted a little later than other jobs.
    old = select(JOBS.c.number).where(
        JOBS.c.state.in_(ENDED_STATES), JOBS.c.run_after < before, JOBS.c.ended_at < before
    )
    old = old.where(JOBS.c.lease_until.is_(None) | (JOBS.c.lease_until <= now))
    return old.order_by(JOBS.c.number)
