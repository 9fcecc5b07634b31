"""Single steps on the rows of the store; each runs inside a transaction of `jobs/store.py`."""

import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Row, Select, func, insert, literal, select, update

from jobs.errors import IllegalMove, JobNotFound, LeaseLost
from jobs.outcome import JobOutcome
from jobs.record import MOVES, Delivery, Job, state_after
from jobs.schema import DELIVERIES, JOB_DELIVERIES, JOBS, insert_missing
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


def record(row: Row[Any], delivery_ids: Sequence[str] = ()) -> Job:
    return Job(
        id=job_id_of(row.number),
        state=row.state,
        spec=_naming(JobSpec.model_validate_json(row.spec), tuple(delivery_ids)),
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


def spec_as_json(spec: JobSpec) -> str:
    """For the column, which names no deliveries."""
    return _naming(spec, ()).model_dump_json()


def _naming(spec: JobSpec, delivery_ids: tuple[str, ...]) -> JobSpec:
    if spec.revisions is None or spec.revisions.delivery_ids == delivery_ids:
        return spec
    revisions = spec.revisions.model_copy(update={"delivery_ids": delivery_ids})
    return spec.model_copy(update={"revisions": revisions})


def read(connection: Connection, query: Select[Any]) -> list[Job]:
    """The jobs that `query` selects, in its order, with the deliveries that each answers for."""
    rows = connection.execute(query).all()
    delivery_ids: defaultdict[int, list[str]] = defaultdict(list)
    chosen = query.with_only_columns(JOBS.c.number)
    names = select(JOB_DELIVERIES.c.job_number, JOB_DELIVERIES.c.delivery_id)
    names = names.where(JOB_DELIVERIES.c.job_number.in_(chosen)).order_by(JOB_DELIVERIES.c.arrival)
    for number, delivery_id in connection.execute(names):
        delivery_ids[number].append(delivery_id)
    return [record(row, delivery_ids[row.number]) for row in rows]


def fetch(connection: Connection, number: int) -> Job:
    found = read(connection, select(JOBS).where(JOBS.c.number == number))
    if not found:
        raise JobNotFound(job_id_of(number))
    return found[0]


def change(connection: Connection, job_id: str, **values: Any) -> Job:
    number = number_of(job_id)
    connection.execute(update(JOBS).where(JOBS.c.number == number).values(**values))
    return fetch(connection, number)


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
        change(connection, successor.id, spec=spec_as_json(spec))
        _name_for(connection, successor, job)
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
    pending = select(JOBS).where(JOBS.c.pipeline == pipeline, JOBS.c.state == "SCHEDULING")
    return next(iter(read(connection, pending)), None)


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


def name_deliveries(
    connection: Connection, named: Sequence[tuple[int, str]], received_at: float
) -> None:
    """Let each job, by its number, answer for that delivery too. A delivery is named once."""
    if not named:
        return
    arrived = connection.scalar(select(func.max(JOB_DELIVERIES.c.arrival))) or 0
    connection.execute(
        insert_missing(connection, JOB_DELIVERIES),
        [
            {
                "job_number": number,
                "delivery_id": delivery_id,
                "arrival": arrival,
                "received_at": received_at,
            }
            for arrival, (number, delivery_id) in enumerate(named, start=arrived + 1)
        ],
    )


def _name_for(connection: Connection, successor: Job, failed: Job) -> None:
    columns = JOB_DELIVERIES.c
    of_both = select(
        literal(number_of(successor.id)), columns.delivery_id, columns.arrival, columns.received_at
    ).where(columns.job_number == number_of(failed.id))
    names = ["job_number", "delivery_id", "arrival", "received_at"]
    connection.execute(insert_missing(connection, JOB_DELIVERIES).from_select(names, of_both))


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
