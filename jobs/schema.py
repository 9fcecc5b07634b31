"""The tables of the job store, and their rows. A function with the argument `connection` runs in
the caller's transaction.

A *push job* belongs to a pipeline and was not submitted by hand. The docstring of the package
`jobs` explains the other terms, such as "lease".

A pipeline may have one running job and two pending jobs: one created by pushes, and one submitted
by a person (`by_hand`). Two partial unique indexes enforce this limit, so even a bug cannot create
more jobs.
"""

import json
import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from typing import Any

from sqlalchemy import (
    Boolean,
    Column,
    Connection,
    Float,
    Index,
    Integer,
    MetaData,
    Row,
    Select,
    String,
    Table,
    Text,
    select,
    text,
    update,
)
from sqlalchemy.sql.dml import ReturningUpdate

from jobs.errors import JobNotFound, LeaseLost
from jobs.job import Job, final_state
from jobs.outcome import JobOutcome
from jobs.spec import LOCAL, JobSpec

METADATA = MetaData()

MAX_DIGITS = 9
"""A job id with more digits than this is never looked up: its number might be too large for a
column of the type INTEGER in Postgres."""


def _where(condition: str) -> dict[str, Any]:
    return {f"{dialect}_where": text(condition) for dialect in ("sqlite", "postgresql")}


def _unique_in_state(name: str, state: str, *columns: str) -> Index:
    return Index(name, *columns, unique=True, **_where(f"state = '{state}'"))


JOBS = Table(
    "jobs",
    METADATA,
    Column("number", Integer, primary_key=True, autoincrement=True),
    Column("pipeline", String),
    # The commit that the job trains on, once it is known.
    Column("head", String),
    Column("state", String, nullable=False),
    Column("spec", Text, nullable=False),
    Column("payload", Text),
    Column("outcome", Text),
    Column("created_at", Float, nullable=False),
    Column("run_after", Float, nullable=False),
    Column("started_at", Float),
    Column("ended_at", Float),
    Column("attempt", Integer, nullable=False),
    Column("num_lost", Integer, nullable=False),
    Column("owner", String),
    # It has four meanings: see `Job.lease_until`.
    Column("lease_until", Float),
    Column("handle", Text),
    Column("cancel_requested", Boolean, nullable=False),
    Column("by_hand", Boolean, nullable=False),
    # Whether the job needs a process of the runner, and not of a launcher.
    Column("is_local", Boolean, nullable=False),
    Column("waits_for", Text),
    # When the handlers of `pipeline/runner/after_jobs.py` got the outcome.
    Column("handled_at", Float),
    _unique_in_state("one_pending_job_per_pipeline", "SCHEDULING", "pipeline", "by_hand"),
    _unique_in_state("one_running_job_per_pipeline", "RUNNING", "pipeline"),
    Index("jobs_by_pipeline", "pipeline", "number"),
    Index("jobs_by_state", "state", "run_after"),
    Index("jobs_by_head", "head"),
    Index("jobs_to_handle", "ended_at", **_where("ended_at IS NOT NULL AND handled_at IS NULL")),
    # With AUTOINCREMENT, SQLite never uses the number of a deleted job again. Otherwise a new job
    # could get this number, and with it the folder of the deleted job, which may still exist.
    sqlite_autoincrement=True,
)

DELIVERIES = Table(
    "deliveries",
    METADATA,
    Column("source", String, primary_key=True),
    Column("id", String, primary_key=True),
    # The number of the delivery in the order of arrival.
    Column("arrival", Integer, nullable=False),
    # The commit that the delivery announced.
    Column("announced", String),
    Column("received_at", Float, nullable=False),
    Column("job_number", Integer, nullable=False),
    Index("deliveries_by_job", "job_number", "arrival"),
    Index("deliveries_by_arrival", "arrival"),
    Index("deliveries_by_commit", "announced"),
)

PAUSES = Table(
    "pauses",
    METADATA,
    Column("pipeline", String, primary_key=True),
    Column("since", Float, nullable=False),
)
"""The paused pipelines: no push job of these pipelines is started."""

SCHEMA_REVISION = "jobs6"
"""The schema that this module declares."""


# Rows


_FIELDS = [each.name for each in fields(Job) if each.name in JOBS.c]
"""The fields of `Job` that have a column."""


def job_id_of(number: int) -> str:
    return f"j{number:06d}"


def is_job_id(text: str) -> bool:
    digits = text.removeprefix("j")
    is_number = digits.isascii() and digits.isdigit() and len(digits) <= MAX_DIGITS
    return is_number and job_id_of(int(digits)) == text


def number_of(job_id: str) -> int:
    """The number in a job id: 12 for `j000012`. Raises JobNotFound if the text is not a job id."""
    if not is_job_id(job_id):
        raise JobNotFound(job_id)
    return int(job_id[1:])


def job_from_row(
    row: Row[Any],
    delivery_ids: Sequence[str] = (),
    paused: Collection[str] = (),
    running: Mapping[str, int] = {},
) -> Job:
    """`running` maps each pipeline that has a running job to the job's number."""
    waits_for = row.waits_for
    if row.state == "SCHEDULING" and row.pipeline in running:
        waits_for = f"{job_id_of(running[row.pipeline])} is running"
    if row.state == "SCHEDULING" and not row.by_hand and row.pipeline in paused:
        waits_for = f"{row.pipeline} is paused; to go on: pipeline resume {row.pipeline}"
    outcome = None if row.outcome is None else JobOutcome.model_validate_json(row.outcome)
    spec = JobSpec.model_validate_json(row.spec)
    if row.state == "RUNNING" and row.owner is None and outcome is not None:
        at = time.strftime("%H:%M:%S", time.localtime(row.run_after))
        waits_for = (
            f"attempt {row.attempt - 1} failed; the next one may start at {at}: {outcome.reason}"
        )
    elif row.state == "RUNNING" and row.handle is None and spec.launcher != LOCAL:
        waits_for = f"no agent has begun on {spec.launcher} yet"
    facts = {name: getattr(row, name) for name in _FIELDS} | {
        "id": job_id_of(row.number),
        "spec": with_revisions(spec, delivery_ids=tuple(dict.fromkeys(delivery_ids))),
        "payload": None if row.payload is None else json.loads(row.payload),
        "outcome": outcome if row.ended_at is not None else None,
        "last_failure": outcome if row.ended_at is None else None,
        "waits_for": waits_for,
    }
    return Job(**facts)


def spec_as_json(spec: JobSpec) -> str:
    """The text for the `spec` column. The delivery ids are left out, because they are rows of the
    table `deliveries`."""
    return with_revisions(spec, delivery_ids=()).model_dump_json()


def with_revisions(spec: JobSpec, **values: Any) -> JobSpec:
    """The spec with these values in its range of commits. A spec without a range stays as it is."""
    if spec.revisions is None:
        return spec
    revisions = spec.revisions.model_copy(update=values)
    return spec.model_copy(update={"revisions": revisions})


def select_jobs(
    connection: Connection,
    query: Select[Any] | ReturningUpdate[Any],
    *,
    may_wait: bool = True,
) -> list[Job]:
    """The jobs that `query` selects, in the order of the query, each job with its delivery ids; or
    the only job that it changes. Without `may_wait`, none of them waits for another job or a
    pause."""
    rows = connection.execute(query).all()
    if not rows:
        return []
    if len(rows) == 1 or isinstance(query, ReturningUpdate):
        query = select(JOBS).where(JOBS.c.number == rows[0].number)
    delivery_ids: defaultdict[int, list[str]] = defaultdict(list)
    numbers = query.with_only_columns(JOBS.c.number)
    links = select(DELIVERIES.c.job_number, DELIVERIES.c.id)
    links = links.where(DELIVERIES.c.job_number.in_(numbers)).order_by(DELIVERIES.c.arrival)
    for number, delivery_id in connection.execute(links):
        delivery_ids[number].append(delivery_id)
    paused: Sequence[str] = ()
    running: dict[str, int] = {}
    if may_wait and any(row.state == "SCHEDULING" for row in rows):
        paused = connection.scalars(select(PAUSES.c.pipeline)).all()
        shown = JOBS.c.pipeline.in_(query.with_only_columns(JOBS.c.pipeline))
        busy = select(JOBS.c.pipeline, JOBS.c.number).where(JOBS.c.state == "RUNNING", shown)
        running = {row.pipeline: row.number for row in connection.execute(busy)}
    return [job_from_row(row, delivery_ids[row.number], paused, running) for row in rows]


def fetch_job(connection: Connection, number: int) -> Job:
    found = select_jobs(connection, select(JOBS).where(JOBS.c.number == number))
    if not found:
        raise JobNotFound(job_id_of(number))
    return found[0]


def update_job(connection: Connection, job_id: str, **values: Any) -> Job:
    changed = update(JOBS).where(JOBS.c.number == number_of(job_id)).values(**values)
    found = select_jobs(connection, changed.returning(*JOBS.c))
    if not found:
        raise JobNotFound(job_id)
    return found[0]


def fetch_leased(connection: Connection, job_id: str, owner: str) -> Job:
    """The job. Raises LeaseLost if there is no such job, if it is not running, or if the lease is
    not `owner`'s any more. It does not check whether the lease has run out."""
    is_leased = JOBS.c.number == number_of(job_id), JOBS.c.state == "RUNNING"
    found = select_jobs(connection, select(JOBS).where(*is_leased, JOBS.c.owner == owner))
    if not found:
        raise LeaseLost(job_id, owner)
    return found[0]


def end_job(connection: Connection, job: Job, outcome: JobOutcome | None, now: float) -> Job:
    """End the job with this outcome. Returns the ended job."""
    return update_job(
        connection,
        job.id,
        state=final_state(outcome),
        outcome=None if outcome is None else outcome.model_dump_json(),
        ended_at=now,
        owner=None,
        lease_until=None,
    )


def is_pending(pipeline: str, *, by_hand: bool) -> Any:
    """The SQL condition for one pending job of the pipeline. With `by_hand`, this is the job that
    was submitted by hand. Without `by_hand`, it is the push job."""
    return (
        (JOBS.c.pipeline == pipeline) & (JOBS.c.state == "SCHEDULING") & (JOBS.c.by_hand == by_hand)
    )


def is_paused() -> Any:
    """The SQL condition for push jobs of paused pipelines."""
    return JOBS.c.by_hand.is_(False) & JOBS.c.pipeline.in_(select(PAUSES.c.pipeline))


def is_unhandled(now: float) -> Any:
    """The SQL condition for ended jobs whose outcome somebody must still handle. Of an ended job,
    `lease_until` says how long somebody else does it."""
    is_free = JOBS.c.lease_until.is_(None) | (JOBS.c.lease_until <= now)
    return JOBS.c.ended_at.is_not(None) & JOBS.c.handled_at.is_(None) & is_free


def matches_delivery(source: str, delivery_id: str) -> tuple[Any, ...]:
    return DELIVERIES.c.source == source, DELIVERIES.c.id == delivery_id
