"""Connections to a database, which is a SQLite file or a Postgres server: their transactions, the
creation of the tables, and how a process learns that another one has written."""

import re
import select
import sqlite3
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, MetaData, create_engine, event, inspect, make_url, text
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError

from jobs.errors import OtherSchema, StoreError

BUSY_SECONDS = 10
"""How long a SQLite connection waits for another connection's lock."""

_WRITERS_LOCK = 0x686F7470757368  # the key of our advisory lock on Postgres; an arbitrary number


def connect(
    url_or_path: str | Path, metadata: MetaData, revision: str, *, schema: str | None = None
) -> Engine:
    """An engine for `sqlite:///…`, `postgresql://…`, or a path to a SQLite file, with the tables of
    `metadata`, which are created if there are none. `revision` names what `metadata` declares. On
    Postgres, the tables are in `schema`, by default in the one that the server chooses.

    Raises OtherSchema, and changes nothing, if another version of hotpush wrote the database.
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
                    f"The folder of the database {path} does not exist; create it first."
                )
            url = make_url("sqlite://").set(database=str(path))
        if url.get_backend_name() == "postgresql":
            # Test each connection before use. Otherwise the first queries after a restart of the
            # database server would fail.
            options["pool_pre_ping"] = True
            # A connection that only listens would not notice that the server is gone.
            options["connect_args"] = {"keepalives_idle": 30}
            if schema is not None:
                options["connect_args"]["options"] = f"-c search_path={schema}"
        elif url.get_backend_name() != "sqlite":
            raise ValueError("neither SQLite nor Postgres")
        engine = create_engine(url, **options)
    except (ArgumentError, ValueError, ImportError, NoSuchModuleError):
        # Show neither the rest of the URL nor the text of the error, because both may hold the
        # password.
        start = re.match(r"[A-Za-z0-9+]*(://)?", given)
        raise StoreError(
            f"hotpush cannot use the database '{start and start[0]}…' (the rest is not "
            "shown, because it may hold a password). Write a path, sqlite:///PATH or "
            "postgresql+psycopg://USER:PASSWORD@HOST:PORT/DATABASE. The port must be a number, and "
            "special characters in the password must be written as %XX. Postgres needs a driver; "
            "to install it, run in the folder of hotpush: pip install -e '.[postgres]'"
        ) from None
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", _set_up_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
    try:
        _migrate(engine, metadata, revision)
    except BaseException:
        engine.dispose()
        raise
    return engine


def _set_up_sqlite(dbapi_connection: Any, _record: object) -> None:
    dbapi_connection.isolation_level = None  # the driver must not begin transactions by itself
    cursor = dbapi_connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout = {BUSY_SECONDS * 1000}")
    cursor.execute("PRAGMA foreign_keys = ON")
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
def transaction(engine: Engine, *, writes: bool) -> Iterator[Connection]:
    """On SQLite, only one transaction writes at a time. All statements of a transaction that only
    reads see the same snapshot of the database."""
    with engine.connect() as connection:
        connection = connection.execution_options(writes=writes)
        if engine.dialect.name == "postgresql" and not writes:
            # By default, Postgres takes a new snapshot for each statement.
            connection = connection.execution_options(isolation_level="REPEATABLE READ")
        with connection.begin():
            yield connection


@contextmanager
def writing(engine: Engine) -> Iterator[Connection]:
    """A transaction as in `locked`, of which `watch` tells other processes."""
    with locked(engine) as connection:
        yield connection
        if engine.dialect.name == "postgresql":
            connection.execute(text("NOTIFY hotpush"))  # sent at the commit


@contextmanager
def locked(engine: Engine) -> Iterator[Connection]:
    """A transaction that writes. Only one such transaction runs at a time: on SQLite because of
    BEGIN IMMEDIATE, and on Postgres because of an advisory lock. Keep the transaction short,
    because all other writers wait for it. Raises StoreError if the database fails.
    """
    with _as_store_error(engine), transaction(engine, writes=True) as connection:
        if engine.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _WRITERS_LOCK})
        yield connection


@contextmanager
def reading(engine: Engine) -> Iterator[Connection]:
    """A transaction that only reads. Raises StoreError if the database fails."""
    with _as_store_error(engine), transaction(engine, writes=False) as connection:
        yield connection


def watch(engine: Engine) -> Generator[bool]:
    """Says at each `next` whether anybody has written since the one before; at first, says yes.
    Each costs some microseconds, and sends nothing to the server. Raises StoreError if the
    connection is lost: watch anew then, because a change may have been missed."""
    with _as_store_error(engine):
        pooled = engine.raw_connection()
        driver: Any = pooled.driver_connection
        pooled.detach()  # another user of the connection would get the notifications
        try:
            if engine.dialect.name == "postgresql":
                driver.autocommit = True
                driver.execute("LISTEN hotpush")
                yield True
                while True:
                    # Also readable if it is lost. `notifies` alone would take much longer.
                    is_readable = select.select([driver], [], [], 0)[0]
                    yield any([*driver.notifies(timeout=0)] if is_readable else [])
            seen = None
            while True:
                before, seen = seen, driver.execute("PRAGMA data_version").fetchone()
                yield seen != before
        finally:
            driver.close()


@contextmanager
def _as_store_error(engine: Engine) -> Iterator[None]:
    try:
        yield
    except (SQLAlchemyError, engine.dialect.loaded_dbapi.Error) as error:
        shown = engine.url.render_as_string(hide_password=True)
        cause = str(getattr(error, "orig", None) or error).strip().rstrip(".?")
        raise StoreError(
            f"The database {shown} failed: {cause}. The failed transaction changed nothing. "
            "Check that the database can be reached, and that its disk is writable and not full."
        ) from error


def _migrate(engine: Engine, metadata: MetaData, revision: str) -> None:
    with reading(engine) as connection:
        if _has_tables(connection, revision):
            return
    with locked(engine) as connection:
        # Check again under the write lock, because another process may have created the tables
        # since the first check.
        if not _has_tables(connection, revision):
            metadata.create_all(connection)
            # As Alembic, a library that upgrades database schemas, records revisions.
            connection.execute(text("CREATE TABLE alembic_version (version_num VARCHAR NOT NULL)"))
            connection.execute(
                text("INSERT INTO alembic_version VALUES (:head)"), {"head": revision}
            )


def _has_tables(connection: Connection, revision: str) -> bool:
    if not inspect(connection).has_table("alembic_version"):
        return False
    found: str | None = connection.scalar(text("SELECT version_num FROM alembic_version"))
    if found != revision:
        shown = connection.engine.url.render_as_string(hide_password=True)
        raise OtherSchema(
            f"The database {shown} has schema {found!r}, which this version of hotpush cannot use "
            f"(it needs {revision!r}): another version of hotpush wrote it. Nothing was changed; "
            "use that version, or move the database away to begin with an empty one."
        )
    return True
