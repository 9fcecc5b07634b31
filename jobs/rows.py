"""Single steps on the rows of the store; each runs inside a transaction of `jobs/store.py`."""

import json
from typing import Any

from sqlalchemy import Connection, Row, Update, insert, select, update

from jobs.errors import IllegalMove, JobNotFound, LeaseLost
from jobs.outcome import JobOutcome
from jobs.record import MOVES, Delivery, Job, state_after
from jobs.schema import DELIVERIES, JOBS
from jobs.spec import JobSpec

# Of so many digits every number fits into an INTEGER of PostgreSQL.
MAX_DIGITS = 9


def job_id_of(number: int) -> str:
    return f"j{number:06d}"


def number_of(job_id: str) -> int:
    digits = job_id.removeprefix("j")
    is_number = digits.isascii() and digits.isdigit() and len(digits) <= MAX_DIGITS
    if not is_number or job_id_of(int(digits)) != job_id:
        raise JobNotFound(job_id)
    return int(digits)


def record(row: Row[Any]) -> Job:
    return Job(
        id=job_id_of(row.number),
        state=row.state,
        spec=JobSpec.model_validate_json(row.spec),
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
    )


def fetch(connection: Connection, number: int) -> Job:
    row = connection.execute(select(JOBS).where(JOBS.c.number == number)).one_or_none()
    if row is None:
        raise JobNotFound(job_id_of(number))
    return record(row)


def change(connection: Connection, job_id: str, **values: Any) -> Job:
    query: Update = update(JOBS).where(JOBS.c.number == number_of(job_id)).values(**values)
    return record(connection.execute(query.returning(*JOBS.c)).one())


def fetch_leased(connection: Connection, job_id: str, owner: str) -> Job:
    job = fetch(connection, number_of(job_id))
    if job.state != "RUNNING" or job.owner != owner:
        raise LeaseLost(job_id, owner)
    return job


def end(connection: Connection, job: Job, outcome: JobOutcome | None, now: float) -> Job:
    state = state_after(outcome)
    if state not in MOVES[job.state]:
        raise IllegalMove(job.id, job.state, state)
    successor = fetch_pending(connection, job.spec.pipeline) if state == "ERROR" else None
    if successor is not None:
        spec = joined(job.spec, successor.spec)
        change(connection, successor.id, spec=spec.model_dump_json())
    return change(
        connection,
        job.id,
        state=state,
        outcome=None if outcome is None else outcome.model_dump_json(),
        ended_at=now,
        owner=None,
        lease_until=None,
    )


def fetch_pending(connection: Connection, pipeline: str | None) -> Job | None:
    if pipeline is None:
        return None
    row = connection.execute(
        select(JOBS).where(JOBS.c.pipeline == pipeline, JOBS.c.state == "SCHEDULING")
    ).one_or_none()
    return None if row is None else record(row)


def joined(older: JobSpec, newer: JobSpec) -> JobSpec:
    """The spec of the newer commit, answering for the commits of both.

    `newer` arrived later; where its commits turn out to come first, `older` stays as it is.
    """
    if older.revisions is None:
        return newer
    if newer.revisions is None:
        return newer.model_copy(update={"revisions": older.revisions})
    revisions = older.revisions.absorb(newer.revisions)
    newest = newer if revisions.new_sha == newer.revisions.new_sha else older
    return newest.model_copy(update={"revisions": revisions})


def newest_commit(spec: JobSpec) -> str | None:
    return None if spec.revisions is None else spec.revisions.new_sha


def with_delivery(spec: JobSpec, delivery_id: str) -> JobSpec:
    if spec.revisions is None or delivery_id in spec.revisions.delivery_ids:
        return spec
    ids = (*spec.revisions.delivery_ids, delivery_id)
    return spec.model_copy(
        update={"revisions": spec.revisions.model_copy(update={"delivery_ids": ids})}
    )


def due_at(spec: JobSpec, first_seen: float, now: float) -> float:
    return min(first_seen + spec.max_wait_seconds, now + spec.debounce_seconds)


def is_delivery(source: str, delivery_id: str) -> tuple[Any, ...]:
    return DELIVERIES.c.source == source, DELIVERIES.c.id == delivery_id


def write_ignored(connection: Connection, delivery: Delivery, now: float, reason: str) -> None:
    """The first answer to a delivery stands."""
    matches = is_delivery(delivery.source, delivery.id)
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
    running = JOBS.alias("running")
    blocked = (
        select(running.c.number)
        .where(running.c.pipeline == JOBS.c.pipeline, running.c.state == "RUNNING")
        .exists()
    )
    return (JOBS.c.state == "SCHEDULING") & ~blocked
