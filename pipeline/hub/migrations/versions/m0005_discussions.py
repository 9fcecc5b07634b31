"""Discussions and pull requests, and what happened in them."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "discussions",
        sa.Column("id", sa.String, primary_key=True),
        sa.Column(
            "repository_id",
            sa.String,
            sa.ForeignKey("repositories.id", ondelete="CASCADE"),
            nullable=False,
        ),
        sa.Column("num", sa.Integer, nullable=False),
        sa.Column("title", sa.String, nullable=False),
        sa.Column("author", sa.String, nullable=False),
        sa.Column("status", sa.String, nullable=False),
        sa.Column("base", sa.String),
        sa.Column("merge_commit", sa.String),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.UniqueConstraint("repository_id", "num"),
    )
    op.create_table(
        "discussion_events",
        sa.Column("seq", sa.Integer, primary_key=True),
        sa.Column("id", sa.String, nullable=False, unique=True),
        sa.Column(
            "discussion_id",
            sa.String,
            sa.ForeignKey("discussions.id", ondelete="CASCADE"),
            nullable=False,
            index=True,
        ),
        sa.Column("type", sa.String, nullable=False),
        sa.Column("author", sa.String, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("data", sa.JSON, nullable=False),
    )
