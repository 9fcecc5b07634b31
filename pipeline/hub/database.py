"""Opens the hub's SQLite file, and makes its tables."""

import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from sqlalchemy import Connection, Engine, create_engine, event, insert
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.pool import ConnectionPoolEntry

from pipeline.hub.errors import HubError
from pipeline.hub.schema import metadata, schema_revision

SCHEMA_REVISION = "hub3"
"""The schema that `schema.py` declares. A file with another one is refused."""


class Database:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        # The writers of this process wait for this lock. If they waited in SQLite, each would sleep
        # and try again, which takes longer.
        self._turn = threading.Lock()
        self.after_write: Callable[[], None] = lambda: None
        """Tells the deliverer that there may be something to send. Any thread may call it."""

    @contextmanager
    def read(self) -> Iterator[Connection]:
        with self._engine.begin() as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A transaction. While it lasts, no other transaction can write. It is on disk when the
        block ends."""
        with self._turn, _immediate(self._engine) as connection:
            yield connection
        self.after_write()

    def close(self) -> None:
        self._engine.dispose()


@contextmanager
def _immediate(engine: Engine) -> Iterator[Connection]:
    with engine.connect() as connection:
        connection = connection.execution_options(sqlite_begin="BEGIN IMMEDIATE")
        with connection.begin():
            yield connection


def open_database(path: Path) -> Database:
    """Opens the file, or makes a new one. Raises HubError if a hub of another version wrote the
    file or if it is not a database of a hub. The file then stays as it is."""
    is_new = check_schema(path) is None
    engine = _engine(path)
    if is_new:
        with _immediate(engine) as connection:
            metadata.create_all(connection)
            connection.execute(insert(schema_revision).values(version_num=SCHEMA_REVISION))
    return Database(engine)


def _engine(path: Path) -> Engine:
    engine = create_engine(f"sqlite:///{path}", connect_args={"timeout": 30})

    @event.listens_for(engine, "connect")
    def set_up(connection: DBAPIConnection, _: ConnectionPoolEntry) -> None:
        # Otherwise, Python's sqlite3 would begin the transactions itself, too late and without a
        # lock.
        connection.isolation_level = None
        cursor = connection.cursor()
        for pragma in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON"):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        options = connection.get_execution_options()
        connection.exec_driver_sql(options.get("sqlite_begin", "BEGIN"))

    return engine


@contextmanager
def read_only(path: Path) -> Iterator[sqlite3.Connection]:
    """The file of a hub, which may run in another process. Raises HubError if it is damaged."""
    try:
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as connection:
            yield connection
    except sqlite3.DatabaseError as error:
        raise HubError(
            f"{path} cannot be read ({error}): check that it is the database of the hub."
        ) from error


def check_schema(path: Path) -> str | None:
    """The revision of the file's schema, or None for a new file. Raises HubError as `open_database`
    does. Changes nothing."""
    if not path.exists():
        return None
    with read_only(path) as connection:
        if not connection.execute("SELECT 1 FROM sqlite_master").fetchone():
            return None
        [found] = connection.execute("SELECT version_num FROM alembic_version").fetchone()
    if found != SCHEMA_REVISION:
        raise HubError(
            f"{path} has schema {found!r}, and this hub knows only {SCHEMA_REVISION!r}: another "
            "version of hotpush wrote it. Start that version, or choose another folder."
        )
    return SCHEMA_REVISION
