"""The hub's tables. Times are seconds since the epoch, UTC."""

from typing import Any

from sqlalchemy import (
    JSON,
    Boolean,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    UniqueConstraint,
    text,
)

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
    Column("private", Boolean, nullable=False),
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
    # The ids of the only repositories that the token reaches; null if it reaches all.
    Column("repositories", JSON(none_as_null=True)),
    Column("created_at", Float, nullable=False),
    # May be up to a minute too early, because it is stored at most once a minute.
    Column("last_used_at", Float),
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

# The secrets of a Space, for the environment of its app.
space_secrets = Table(
    "space_secrets",
    metadata,
    _of_repository(primary_key=True),
    Column("key", String, primary_key=True),
    Column("encrypted_value", LargeBinary, nullable=False),
    Column("description", String),
    Column("updated_at", Float, nullable=False),
)

webhooks = Table(
    "webhooks",
    metadata,
    Column("id", String, primary_key=True),
    # Null for a webhook that starts a copy of the job `job_id`.
    Column("url", String),
    Column("job_id", String),
    Column("encrypted_secrets", LargeBinary),
    Column("watched", JSON, nullable=False),
    Column("domains", JSON, nullable=False),
    Column("encrypted_secret", LargeBinary),
    Column("disabled", Boolean, nullable=False),
    Column("created_at", Float, nullable=False),
    # The time of the first failed attempt since the last successful one.
    Column("failing_since", Float),
    Column("suspended_at", Float),
    # The head of the queue is sent at this time; at once if it is null.
    Column("retry_at", Float),
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
