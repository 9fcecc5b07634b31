"""The hub's tables, and the SQLite file that has them. Times are seconds since the epoch, UTC."""

import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import (
    JSON,
    Boolean,
    Column,
    Connection,
    Engine,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    UniqueConstraint,
    create_engine,
    event,
    insert,
    text,
)
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.pool import ConnectionPoolEntry

from pipeline.hub.errors import HubError

metadata = MetaData()


def _of_repository(**options: Any) -> Column[str]:
    """The id of a repository. The row is deleted with the repository."""
    key = ForeignKey("repositories.id", ondelete="CASCADE")
    return Column("repository_id", String, key, **options)


schema_revision = Table("alembic_version", metadata, Column("version_num", String, nullable=False))

repositories = Table(
    "repositories",
    metadata,
    Column("id", String, primary_key=True),
    Column("type", String, nullable=False),
    # Names are compared without case, also for uniqueness.
    Column("owner", String(collation="NOCASE"), nullable=False),
    Column("name", String(collation="NOCASE"), nullable=False),
    Column("created_at", Float, nullable=False),
    UniqueConstraint("type", "owner", "name"),
)

# The sha that each ref had when its last event was stored. The hub finds the changes of a push by
# comparing the present refs with these.
refs = Table(
    "refs",
    metadata,
    _of_repository(primary_key=True),
    Column("ref", String, primary_key=True),
    Column("sha", String, nullable=False),
)

# An event is not deleted with its repository, because the event of the deletion must be delivered.
events = Table(
    "events",
    metadata,
    Column("seq", Integer, primary_key=True),
    Column("repository_id", String, nullable=False, index=True),
    Column("type", String, nullable=False),
    Column("owner", String, nullable=False),
    Column("name", String, nullable=False),
    Column("action", String, nullable=False),
    Column("scope", String, nullable=False),
    # [{"ref", "old_sha", "new_sha"}, …]: the refs that one push moved, the default branch first.
    Column("updated_refs", JSON, nullable=False, server_default="[]"),
    Column("created_at", Float, nullable=False),
    sqlite_autoincrement=True,
)

tokens = Table(
    "tokens",
    metadata,
    Column("name", String, primary_key=True),
    # SHA-256 of the token. The token itself is shown once and never stored.
    Column("digest", String, nullable=False, unique=True),
    Column("role", String, nullable=False),
    Column("created_at", Float, nullable=False),
)

discussions = Table(
    "discussions",
    metadata,
    Column("id", String, primary_key=True),
    _of_repository(nullable=False),
    Column("num", Integer, nullable=False),
    Column("title", String, nullable=False),
    Column("author", String, nullable=False),
    Column("status", String, nullable=False),
    # The full name of the branch that a pull request is for; null for a discussion.
    Column("base", String),
    Column("merge_commit", String),
    Column("created_at", Float, nullable=False),
    UniqueConstraint("repository_id", "num"),
)

discussion_events = Table(
    "discussion_events",
    metadata,
    Column("seq", Integer, primary_key=True),
    Column("id", String, nullable=False, unique=True),
    Column(
        "discussion_id",
        String,
        ForeignKey("discussions.id", ondelete="CASCADE"),
        nullable=False,
        index=True,
    ),
    Column("type", String, nullable=False),
    Column("author", String, nullable=False),
    Column("created_at", Float, nullable=False),
    # The text of a comment, or the new status.
    Column("text", String, nullable=False),
)

webhooks = Table(
    "webhooks",
    metadata,
    Column("id", String, primary_key=True),
    # Null for a webhook that starts a copy of the job `job_id`.
    Column("url", String),
    Column("job_id", String),
    Column("watched", JSON, nullable=False),
    Column("domains", JSON, nullable=False),
    Column("encrypted_secret", String),
    Column("disabled", Boolean, nullable=False),
    Column("created_at", Float, nullable=False),
    # The time of the first failed attempt since the last successful one.
    Column("failing_since", Float),
    Column("suspended_at", Float),
    # The head of the queue is sent at this time; at once if it is null.
    Column("retry_at", Float),
)

scheduled_jobs = Table(
    "scheduled_jobs",
    metadata,
    Column("id", String, primary_key=True),
    # The `JobSpec` of each run, with its secrets sealed.
    Column("spec", JSON, nullable=False),
    Column("schedule", String, nullable=False),
    # Whether a run may start while the last one has not ended.
    Column("concurrency", Boolean, nullable=False),
    Column("created_at", Float, nullable=False),
    # Null while the scheduled job is suspended.
    Column("next_run_at", Float),
    Column("last_job_id", String),
    Column("last_run_at", Float),
)

deliveries = Table(
    "deliveries",
    metadata,
    Column("id", String, primary_key=True),
    Column("webhook_id", String, ForeignKey("webhooks.id", ondelete="CASCADE"), nullable=False),
    Column("event_seq", Integer, ForeignKey("events.seq"), nullable=False, index=True),
    Column("payload", String, nullable=False),
    Column("status", String, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("queued_at", Float, nullable=False),
    Column("last_attempt_at", Float),
    Column("response_status", Integer),
    Column("response_head", String),
    Column("error", String),
    Column("milliseconds", Float),
    # For a delivery that a forced replay made: the id of the delivery that was replayed. Else null.
    Column("replay_of", String),
    Index("deliveries_of_webhook", "webhook_id", "event_seq"),
    Index("deliveries_pending", "webhook_id", "event_seq", sqlite_where=text("status = 'pending'")),
)


SCHEMA_REVISION = "hub8"
"""What this file declares, and where the repositories are. Another revision is refused."""

REPOS = "repos"
"""The folder of the repositories, beside the database."""


class Database:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        # The writers of this process wait for this lock. If they waited in SQLite, each would sleep
        # and try again, which takes longer.
        self._turn = threading.Lock()
        self.after_write: Callable[[], object] = lambda: None
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
    file, if it is not a database of a hub, or if the folder of its repositories is missing. The
    file then stays as it is."""
    is_new = check_database(path) is None
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


def check_database(path: Path) -> str | None:
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
                f"{path} has schema {found!r}, and this hub knows only {SCHEMA_REVISION!r}: "
                "another version of hotpush wrote it. Start that version, or choose another folder."
            )
        has_repositories = connection.execute("SELECT 1 FROM repositories").fetchone()
    repos = path.with_name(REPOS)
    if has_repositories and not repos.is_dir():
        # Without the folder, the hub would take each repository for one that a person removed.
        raise HubError(
            f"{path} has repositories, but their folder {repos} is missing: mount its disk, or "
            "restore it from a backup."
        )
    return SCHEMA_REVISION


def jobs_of_webhooks(path: Path) -> set[str]:
    """The ids of the jobs of which webhooks start copies. Reads the database file `path` of a hub,
    which may run in another process. Empty if there is no file. Raises HubError."""
    if not path.exists():
        return set()
    with read_only(path) as connection:
        rows = connection.execute("SELECT job_id FROM webhooks WHERE job_id IS NOT NULL")
        return {job_id for (job_id,) in rows}
