"""Repositories and their refs, events, webhooks, deliveries."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "repositories",
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("type", sa.String, nullable=False),
        sa.Column("owner", sa.String, nullable=False),
        sa.Column("name", sa.String, nullable=False),
        sa.Column("private", sa.Boolean, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.UniqueConstraint("type", "owner", "name"),
    )
    op.create_table(
        "refs",
        sa.Column(
            "repository_id",
            sa.String,
            sa.ForeignKey("repositories.id", ondelete="CASCADE"),
            primary_key=True,
        ),
        sa.Column("ref", sa.String, primary_key=True),
        sa.Column("sha", sa.String, nullable=False),
    )
    op.create_table(
        "events",
        sa.Column("seq", sa.Integer, primary_key=True),
        sa.Column("repository_id", sa.String, nullable=False, index=True),
        sa.Column("type", sa.String, nullable=False),
        sa.Column("owner", sa.String, nullable=False),
        sa.Column("name", sa.String, nullable=False),
        sa.Column("action", sa.String, nullable=False),
        sa.Column("scope", sa.String, nullable=False),
        sa.Column("ref", sa.String),
        sa.Column("old_sha", sa.String),
        sa.Column("new_sha", sa.String),
        sa.Column("created_at", sa.Float, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "webhooks",
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("url", sa.String, nullable=False),
        sa.Column("watched", sa.JSON, nullable=False),
        sa.Column("domains", sa.JSON, nullable=False),
        sa.Column("encrypted_secret", sa.LargeBinary),
        sa.Column("disabled", sa.Boolean, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
    )
    op.create_table(
        "deliveries",
        sa.Column("id", sa.String, primary_key=True),
        sa.Column(
            "webhook_id",
            sa.String,
            sa.ForeignKey("webhooks.id", ondelete="CASCADE"),
            nullable=False,
        ),
        sa.Column("event_seq", sa.Integer, sa.ForeignKey("events.seq"), nullable=False),
        sa.Column("payload", sa.String, nullable=False),
        sa.Column("status", sa.String, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("queued_at", sa.Float, nullable=False),
        sa.Column("next_attempt_at", sa.Float),
        sa.Column("last_attempt_at", sa.Float),
        sa.Column("response_status", sa.Integer),
        sa.Column("response_head", sa.String),
        sa.Column("error", sa.String),
        sa.Column("milliseconds", sa.Float),
    )
    op.create_index("deliveries_of_webhook", "deliveries", ["webhook_id", "event_seq"])
    op.create_index(
        "deliveries_pending",
        "deliveries",
        ["webhook_id", "event_seq"],
        sqlite_where=sa.text("status = 'pending'"),
    )
