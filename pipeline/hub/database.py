"""The hub's tables, and the database that has them: a file in the hub's state folder, or a Postgres
server. Times are seconds since the epoch, UTC."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    event,
    select,
    text,
)

from jobs.database import connect, reading, transaction
from pipeline.hub.errors import HubError

metadata = MetaData()

_SCHEMA = "hub"
"""The tables' schema on Postgres, where the job store may be in the same database."""


@event.listens_for(metadata, "before_create")
def _prepare_postgres(_: MetaData, connection: Connection, **__: object) -> None:
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql(f"CREATE SCHEMA IF NOT EXISTS {_SCHEMA}")
        # Ignores case, as the one of this name that SQLite has.
        options = "provider = icu, locale = 'und-u-ks-level2', deterministic = false"
        name = f'{_SCHEMA}."NOCASE"'
        connection.exec_driver_sql(f"CREATE COLLATION IF NOT EXISTS {name} ({options})")


def _of_repository(**options: Any) -> Column[str]:
    """The id of a repository. The row is deleted with the repository."""
    key = ForeignKey("repositories.id", ondelete="CASCADE")
    return Column("repository_id", String, key, **options)


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
    Column("created_at", Float, nullable=False),
    Column("next_run_at", Float, nullable=False),
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
    Index(
        "deliveries_pending",
        "webhook_id",
        "event_seq",
        sqlite_where=text("status = 'pending'"),
        postgresql_where=text("status = 'pending'"),
    ),
)


SCHEMA_REVISION = "hub10"
"""What this file declares, and where the repositories are. Another revision is refused."""

REPOS = "repos"
"""The folder of the repositories, in the hub's state folder."""


class Database:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        # The writers of this process wait for this lock. If they waited in SQLite, each would sleep
        # and try again, which takes longer. On Postgres, only this process writes.
        self._turn = threading.Lock()
        self.after_write: Callable[[], object] = lambda: None
        """Tells the deliverer that there may be something to send. Any thread may call it."""

    @contextmanager
    def read(self) -> Iterator[Connection]:
        with transaction(self._engine, writes=False) as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A transaction. While it lasts, no other transaction can write. It is on disk when the
        block ends."""
        with self._turn, transaction(self._engine, writes=True) as connection:
            yield connection
        self.after_write()

    def close(self) -> None:
        self._engine.dispose()


def open_database(root: Path, url: str | None = None) -> Database:
    """Opens the database at `url`, by default the file in the hub's state folder `root`, and makes
    its tables if it is new. Raises StoreError if it cannot be used or if a hub of another version
    wrote it, and HubError if its repositories are not in `root`. It then stays as it is."""
    check_database(root, url)
    return Database(_connect(url or database_file(root)))


def _connect(where: str | Path) -> Engine:
    return connect(where, metadata, SCHEMA_REVISION, schema=_SCHEMA)


def database_file(root: Path) -> Path:
    return root.absolute() / "hub.sqlite"


@contextmanager
def read_only(root: Path, url: str | None = None) -> Iterator[Connection]:
    """The database of a hub, which may run in another process. Empty, in memory, if there is no
    file yet. Raises StoreError as `open_database`."""
    file = database_file(root)
    engine = _connect(url or (file if file.exists() else "sqlite://"))
    try:
        with reading(engine) as connection:
            yield connection
    finally:
        engine.dispose()


def check_database(root: Path, url: str | None = None, *, is_hub_here: bool = True) -> None:
    """Raises the errors of `open_database`, and makes no file. The folders of the repositories are
    looked for only if the hub runs on this machine."""
    with read_only(root, url) as connection:
        ids = connection.scalars(select(repositories.c.id)).all()
    repos = root / REPOS
    if is_hub_here and ids and not any((repos / f"{id}.git").is_dir() for id in ids):
        # The hub would take each repository for one that a person removed.
        raise HubError(
            f"The hub's database has {len(ids)} repositories, but none of their folders is in "
            f"{repos}: mount its disk, or restore it from a backup."
        )


def jobs_of_webhooks(root: Path, url: str | None = None) -> set[str]:
    """The ids of the jobs of which webhooks start copies. Raises StoreError."""
    with read_only(root, url) as connection:
        ids = connection.scalars(select(webhooks.c.job_id).where(webhooks.c.job_id.is_not(None)))
        return set(ids)
