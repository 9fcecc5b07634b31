"""Reads and writes rows of the job store. A function with the argument `connection` runs in the
caller's transaction.

A *push job* belongs to a pipeline and was not submitted by hand. The docstring of the package
`jobs` explains the other terms, such as "answers for" and "lease".
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import Connection, Row, Select, func, insert, literal, select, update

from jobs.errors import IllegalTransition, JobNotFound, LeaseLost
from jobs.job import TRANSITIONS, Delivery, Job, final_state
from jobs.outcome import JobOutcome
from jobs.schema import DELIVERIES, JOB_DELIVERIES, JOBS, insert_missing
from jobs.spec import JobSpec

MAX_DIGITS = 9
"""A job id with more digits than this is never looked up: its number might be too large for a
column of the type INTEGER in Postgres."""


def job_id_of(number: int) -> str:
    return f"j{number:06d}"


def number_of(job_id: str) -> int:
    """The number in a job id: 12 for `j000012`. Raises JobNotFound if the text is not a job id."""
    digits = job_id.removeprefix("j")
    is_number = digits.isascii() and digits.isdigit() and len(digits) <= MAX_DIGITS
    if not is_number or job_id_of(int(digits)) != job_id:
        raise JobNotFound(job_id)
    return int(digits)


def job_from_row(row: Row[Any], delivery_ids: Sequence[str] = ()) -> Job:
    return Job(
        id=job_id_of(row.number),
        state=row.state,
        spec=_with_delivery_ids(JobSpec.model_validate_json(row.spec), tuple(delivery_ids)),
        payload=None if row.payload is None else json.loads(row.payload),
        outcome=None if row.outcome is None else JobOutcome.model_validate_json(row.outcome),
        created_at=row.created_at,
        run_after=row.run_after,
        started_at=row.started_at,
        ended_at=row.ended_at,
        attempt=row.attempt,
        num_lost=row.num_lost,
        owner=row.owner,
        lease_until=row.lease_until,
        handle=row.handle,
        cancel_requested=row.cancel_requested,
        by_hand=row.by_hand,
    )


def spec_as_json(spec: JobSpec) -> str:
    """The text for the `spec` column. The delivery ids are left out, because they are rows of the
    table `job_deliveries`."""
    return _with_delivery_ids(spec, ()).model_dump_json()


def _with_delivery_ids(spec: JobSpec, delivery_ids: tuple[str, ...]) -> JobSpec:
    if spec.revisions is None or spec.revisions.delivery_ids == delivery_ids:
        return spec
    revisions = spec.revisions.model_copy(update={"delivery_ids": delivery_ids})
    return spec.model_copy(update={"revisions": revisions})


def select_jobs(connection: Connection, query: Select[Any]) -> list[Job]:
    """The jobs that `query` selects, in the order of the query, each job with its delivery ids."""
    rows = connection.execute(query).all()
    delivery_ids: defaultdict[int, list[str]] = defaultdict(list)
    numbers = query.with_only_columns(JOBS.c.number)
    links = select(JOB_DELIVERIES.c.job_number, JOB_DELIVERIES.c.delivery_id)
    links = links.where(JOB_DELIVERIES.c.job_number.in_(numbers)).order_by(JOB_DELIVERIES.c.arrival)
    for number, delivery_id in connection.execute(links):
        delivery_ids[number].append(delivery_id)
    return [job_from_row(row, delivery_ids[row.number]) for row in rows]


def fetch_job(connection: Connection, number: int) -> Job:
    found = select_jobs(connection, select(JOBS).where(JOBS.c.number == number))
    if not found:
        raise JobNotFound(job_id_of(number))
    return found[0]


def update_job(connection: Connection, job_id: str, **values: Any) -> Job:
    number = number_of(job_id)
    connection.execute(update(JOBS).where(JOBS.c.number == number).values(**values))
    return fetch_job(connection, number)


def fetch_leased(connection: Connection, job_id: str, owner: str) -> Job:
    """The job. Raises LeaseLost if the job is not running, if another runner has taken its lease,
    or if `owner` has given up the lease. It does not check whether the lease has run out. Raises
    JobNotFound if there is no such job."""
    job = fetch_job(connection, number_of(job_id))
    if job.state != "RUNNING" or job.owner != owner:
        raise LeaseLost(job_id, owner)
    return job


def end_job(connection: Connection, job: Job, outcome: JobOutcome | None, now: float) -> Job:
    """End the job with this outcome. If a push job failed, the pipeline's pending push job takes
    over the commits and deliveries of the failed job. Returns the ended job. Raises
    IllegalTransition if a job in this state cannot end with this outcome."""
    state = final_state(outcome)
    if state not in TRANSITIONS[job.state]:
        raise IllegalTransition(job.id, job.state, state)
    successor = fetch_successor(connection, job) if state == "ERROR" else None
    if successor is not None:
        spec = merge_specs(job.spec, successor.spec)
        update_job(connection, successor.id, spec=spec_as_json(spec))
        _copy_links(connection, successor, job)
    return update_job(
        connection,
        job.id,
        state=state,
        outcome=None if outcome is None else outcome.model_dump_json(),
        ended_at=now,
        owner=None,
        lease_until=None,
    )


def fetch_successor(connection: Connection, job: Job) -> Job | None:
    """The pending job that takes over the commits of `job` if `job` fails: the pipeline's pending
    push job. None if no push job is pending.

    A job that was submitted by hand has no successor, because it answers for no push.
    """
    if job.spec.pipeline is None or job.by_hand:
        return None
    pending = select(JOBS).where(is_pending(job.spec.pipeline, by_hand=False))
    return next(iter(select_jobs(connection, pending)), None)


def is_pending(pipeline: str, *, by_hand: bool) -> Any:
    """The SQL condition for one pending job of the pipeline. With `by_hand`, this is the job that
    was submitted by hand. Without `by_hand`, it is the push job."""
    return (
        (JOBS.c.pipeline == pipeline) & (JOBS.c.state == "SCHEDULING") & (JOBS.c.by_hand == by_hand)
    )


def merge_specs(known: JobSpec, arrived: JobSpec, *, may_be_older: bool = True) -> JobSpec:
    """Merge two specs into one that covers the commits of both.

    `arrived` came later than `known`, so its commits are normally newer. The result is then
    `arrived` with a longer range of commits. But deliveries may overtake each other, so the commits
    of `arrived` may be older. The result is then `known` with a longer range.
    `RevisionRange.absorb` decides which commits are older. With `may_be_older=False`, the commits
    of `arrived` always count as newer.
    """
    if known.revisions is None:
        return arrived
    if arrived.revisions is None:
        return arrived.model_copy(update={"revisions": known.revisions})
    revisions = known.revisions.absorb(arrived.revisions, may_be_older=may_be_older)
    newest = arrived if revisions.new_sha == arrived.revisions.new_sha else known
    return newest.model_copy(update={"revisions": revisions})


def newest_commit(spec: JobSpec) -> str | None:
    """The last commit of the spec's range. None if the spec has no range of commits."""
    return None if spec.revisions is None else spec.revisions.new_sha


@dataclass(frozen=True, kw_only=True)
class DeliveryLink:
    """A row of the table `job_deliveries`. It records that the job answers for the delivery."""

    job_number: int
    delivery_id: str
    new_sha: str
    """The commit that the delivery announced."""


def link_deliveries(
    connection: Connection, links: Sequence[DeliveryLink], received_at: float
) -> None:
    """Store the links that are not in the table yet. Each new link gets the next arrival number.
    `received_at` is in seconds since the epoch."""
    if not links:
        return
    arrived = connection.scalar(select(func.max(JOB_DELIVERIES.c.arrival))) or 0
    connection.execute(
        insert_missing(connection, JOB_DELIVERIES),
        [
            {**asdict(link), "arrival": arrival, "received_at": received_at}
            for arrival, link in enumerate(links, start=arrived + 1)
        ],
    )


def _copy_links(connection: Connection, successor: Job, failed: Job) -> None:
    columns = JOB_DELIVERIES.c
    copied = (columns.delivery_id, columns.arrival, columns.received_at, columns.new_sha)
    links = select(literal(number_of(successor.id)), *copied).where(
        columns.job_number == number_of(failed.id)
    )
    names = ["job_number", *(column.name for column in copied)]
    connection.execute(insert_missing(connection, JOB_DELIVERIES).from_select(names, links))


def due_at(spec: JobSpec, first_seen: float, now: float) -> float:
    """When a pending job may start. Its first commit arrived at the time `first_seen`, and its
    newest commit at the time `now`. All times are seconds since the epoch."""
    return min(first_seen + spec.max_wait_seconds, now + spec.debounce_seconds)


def matches_delivery(source: str, delivery_id: str) -> tuple[Any, ...]:
    return DELIVERIES.c.source == source, DELIVERIES.c.id == delivery_id


def insert_ignored(connection: Connection, delivery: Delivery, now: float, reason: str) -> None:
    """Record that the delivery leads to no job. If the delivery is already recorded, change
    nothing, even if its record names a job."""
    matches = matches_delivery(delivery.source, delivery.id)
    if connection.scalar(select(DELIVERIES.c.received_at).where(*matches)) is None:
        connection.execute(
            insert(DELIVERIES).values(
                source=delivery.source,
                id=delivery.id,
                body=delivery.body,
                received_at=now,
                ignored_reason=reason,
            )
        )


def is_claimable() -> Any:
    """The SQL condition for pending jobs that need not wait for another job: no other job of the
    same pipeline is running. (Plain commands have no pipeline, so they block nobody.) The condition
    does not check whether the time `run_after` has come."""
    running = JOBS.alias("running")
    blocked = (
        select(running.c.number)
        .where(running.c.pipeline == JOBS.c.pipeline, running.c.state == "RUNNING")
        .exists()
    )
    return (JOBS.c.state == "SCHEDULING") & ~blocked
