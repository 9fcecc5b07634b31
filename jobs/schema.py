"""The tables of the job store, their rows, and the connections to its database, which is a SQLite
file or a Postgres server. A function with the argument `connection` runs in the caller's
transaction.

A *push job* belongs to a pipeline and was not submitted by hand. The docstring of the package
`jobs` explains the other terms, such as "lease".

A pipeline may have one running job and two pending jobs: one created by pushes, and one submitted
by a person (`by_hand`). Two partial unique indexes enforce this limit, so even a bug cannot create
more jobs.
"""

import json
import re
import sqlite3
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import (
    Boolean,
    Column,
    Connection,
    Engine,
    Float,
    Index,
    Integer,
    MetaData,
    Row,
    Select,
    String,
    Table,
    Text,
    create_engine,
    event,
    insert,
    inspect,
    make_url,
    select,
    text,
    update,
)
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError

from jobs.errors import JobNotFound, LeaseLost, OtherSchema, StoreError
from jobs.job import Job, final_state
from jobs.outcome import JobOutcome
from jobs.spec import JobSpec

METADATA = MetaData()

MAX_DIGITS = 9
"""A job id with more digits than this is never looked up: its number might be too large for a
column of the type INTEGER in Postgres."""

BUSY_SECONDS = 10
"""How long a SQLite connection waits for another connection's lock."""


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

CHANGES = Table("changes", METADATA, Column("number", Integer, primary_key=True))
"""One row: how many transactions have written. `JobStore.num_changes` reads this number."""

_WRITERS_LOCK = 0x686F7470757368  # the key of our advisory lock on Postgres; an arbitrary number


def connect(url_or_path: str | Path) -> Engine:
    """An engine for `sqlite:///…`, `postgresql+psycopg://…`, or a path to a SQLite file.

    Raises StoreError if the URL cannot be used, or if the path is in a folder that does not exist.
    """
    given = str(url_or_path)
    options: dict[str, Any] = {}
    try:
        if "://" in given:
            url = make_url(given)
        else:
            path = Path(given).absolute()
            if not path.parent.is_dir():
                raise StoreError(
                    f"The folder of the job store {path} does not exist; create it first."
                )
            url = make_url("sqlite://").set(database=str(path))
        if url.get_backend_name() == "postgresql":
            # Test each connection before use. Otherwise the first queries after a restart of the
            # database server would fail.
            options["pool_pre_ping"] = True
        elif url.get_backend_name() != "sqlite":
            raise ValueError("neither SQLite nor Postgres")
        engine = create_engine(url, **options)
    except (ArgumentError, ValueError, ImportError, NoSuchModuleError):
        # Show neither the rest of the URL nor the text of the error, because both may hold the
        # password.
        start = re.match(r"[A-Za-z0-9+]*(://)?", given)
        raise StoreError(
            f"The job store cannot use the database '{start and start[0]}…' (the rest is not "
            "shown, because it may hold a password). Write a path, sqlite:///PATH or "
            "postgresql+psycopg://USER:PASSWORD@HOST:PORT/DATABASE. The port must be a number, and "
            "special characters in the password must be written as %XX. Postgres needs a driver; "
            "to install it, run in the folder of hotpush: pip install -e '.[postgres]'"
        ) from None
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", _set_up_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
    return engine


def _set_up_sqlite(dbapi_connection: Any, _record: object) -> None:
    dbapi_connection.isolation_level = None  # the driver must not begin transactions by itself
    cursor = dbapi_connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout = {BUSY_SECONDS * 1000}")
    _use_wal(cursor)
    # With WAL (the write-ahead log), the usual value is NORMAL. But with NORMAL, a power cut can
    # lose the last transactions. So use FULL: once a sender has got its answer, the delivery must
    # survive a power cut.
    cursor.execute("PRAGMA synchronous = FULL")
    cursor.close()


def _use_wal(cursor: sqlite3.Cursor) -> None:
    # Two processes may open a new file at the same time. One of them then finds the file locked.
    # SQLite does not apply busy_timeout to this statement, so try again here.
    give_up = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            cursor.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > give_up:
                raise
        time.sleep(0.01)


def _begin_sqlite(connection: Connection) -> None:
    # A transaction that writes takes the write lock at BEGIN. If it took the lock only at its first
    # write, this write would fail if another transaction had written since the first read.
    writes = connection.get_execution_options().get("writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


@contextmanager
def writing(engine: Engine) -> Iterator[Connection]:
    """A transaction as in `locked`, which other processes notice by `JobStore.num_changes`."""
    with locked(engine) as connection:
        connection.execute(update(CHANGES).values(number=CHANGES.c.number + 1))
        yield connection


@contextmanager
def locked(engine: Engine) -> Iterator[Connection]:
    """A transaction that writes. Only one such transaction runs at a time: on SQLite because of
    BEGIN IMMEDIATE, and on Postgres because of an advisory lock. Keep the transaction short,
    because all other writers wait for it. Raises StoreError if the database fails.
    """
    with _as_store_error(engine), engine.connect() as connection:
        connection = connection.execution_options(writes=True)
        with connection.begin():
            if engine.dialect.name == "postgresql":
                connection.execute(
                    text("SELECT pg_advisory_xact_lock(:key)"), {"key": _WRITERS_LOCK}
                )
            yield connection


@contextmanager
def reading(engine: Engine) -> Iterator[Connection]:
    """A transaction that only reads. All its statements see the same snapshot of the database.
    Raises StoreError if the database fails."""
    with _as_store_error(engine), engine.connect() as connection:
        if engine.dialect.name == "postgresql":
            # By default, Postgres takes a new snapshot for each statement.
            connection = connection.execution_options(isolation_level="REPEATABLE READ")
        with connection.begin():
            yield connection


@contextmanager
def _as_store_error(engine: Engine) -> Iterator[None]:
    try:
        yield
    except (SQLAlchemyError, engine.dialect.loaded_dbapi.Error) as error:
        shown = engine.url.render_as_string(hide_password=True)
        cause = getattr(error, "orig", None) or error
        raise StoreError(
            f"The job store {shown} failed: {str(cause).strip()}. The failed transaction changed "
            "nothing. Check that the database can be reached, and that its disk is writable and "
            "not full."
        ) from error


SCHEMA_REVISION = "jobs4"
"""The schema that this module declares. It is recorded as Alembic, a library that upgrades database
schemas, records its revisions."""


def migrate(engine: Engine) -> None:
    """Create the tables in one transaction. Raises OtherSchema, and changes nothing, if another
    version of hotpush wrote the database."""
    with reading(engine) as connection:
        if _checked_revision(engine, connection) is not None:
            return
    with locked(engine) as connection:
        # Check again under the write lock, because another process may have created the tables
        # since the first check.
        if _checked_revision(engine, connection) is None:
            METADATA.create_all(connection)
            connection.execute(insert(CHANGES).values(number=0))
            connection.execute(text("CREATE TABLE alembic_version (version_num VARCHAR NOT NULL)"))
            connection.execute(
                text("INSERT INTO alembic_version VALUES (:head)"), {"head": SCHEMA_REVISION}
            )


def _checked_revision(engine: Engine, connection: Connection) -> str | None:
    if not inspect(connection).has_table("alembic_version"):
        return None
    revision: str | None = connection.scalar(text("SELECT version_num FROM alembic_version"))
    if revision != SCHEMA_REVISION:
        shown = engine.url.render_as_string(hide_password=True)
        raise OtherSchema(
            f"The job store {shown} has schema {revision!r}, which this version of hotpush cannot "
            f"use (it needs {SCHEMA_REVISION!r}): another version of hotpush wrote the job store. "
            "Nothing was changed; use that version, or move the database away to begin with an "
            "empty one."
        )
    return revision


# Rows


def job_id_of(number: int) -> str:
    return f"j{number:06d}"


def number_of(job_id: str) -> int:
    """The number in a job id: 12 for `j000012`. Raises JobNotFound if the text is not a job id."""
    digits = job_id.removeprefix("j")
    is_number = digits.isascii() and digits.isdigit() and len(digits) <= MAX_DIGITS
    if not is_number or job_id_of(int(digits)) != job_id:
        raise JobNotFound(job_id)
    return int(digits)


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
    return Job(
        id=job_id_of(row.number),
        state=row.state,
        spec=with_revisions(
            JobSpec.model_validate_json(row.spec), delivery_ids=tuple(dict.fromkeys(delivery_ids))
        ),
        payload=None if row.payload is None else json.loads(row.payload),
        outcome=outcome if row.ended_at is not None else None,
        last_failure=outcome if row.ended_at is None else None,
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
        waits_for=waits_for,
    )


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


def select_jobs(connection: Connection, query: Select[Any]) -> list[Job]:
    """The jobs that `query` selects, in the order of the query, each job with its delivery ids."""
    rows = connection.execute(query).all()
    if not rows:
        return []
    delivery_ids: defaultdict[int, list[str]] = defaultdict(list)
    numbers = query.with_only_columns(JOBS.c.number)
    links = select(DELIVERIES.c.job_number, DELIVERIES.c.id)
    links = links.where(DELIVERIES.c.job_number.in_(numbers)).order_by(DELIVERIES.c.arrival)
    for number, delivery_id in connection.execute(links):
        delivery_ids[number].append(delivery_id)
    paused = connection.scalars(select(PAUSES.c.pipeline)).all()
    is_busy = JOBS.c.pipeline.is_not(None), JOBS.c.state == "RUNNING"
    busy = connection.execute(select(JOBS.c.pipeline, JOBS.c.number).where(*is_busy))
    running = {row.pipeline: row.number for row in busy}
    return [job_from_row(row, delivery_ids[row.number], paused, running) for row in rows]


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
    """The job. Raises LeaseLost if the job is not running, or if the lease is not `owner`'s any
    more. It does not check whether the lease has run out. Raises JobNotFound if there is no such
    job."""
    job = fetch_job(connection, number_of(job_id))
    if job.state != "RUNNING" or job.owner != owner:
        raise LeaseLost(job_id, owner)
    return job


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


def matches_delivery(source: str, delivery_id: str) -> tuple[Any, ...]:
    return DELIVERIES.c.source == source, DELIVERIES.c.id == delivery_id
