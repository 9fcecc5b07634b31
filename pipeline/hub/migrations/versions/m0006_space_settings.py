"""Secrets and variables of Spaces."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "space_settings",
        sa.Column(
            "repository_id",
            sa.String,
            sa.ForeignKey("repositories.id", ondelete="CASCADE"),
            primary_key=True,
        ),
        sa.Column("key", sa.String, primary_key=True),
        sa.Column("value", sa.String),
        sa.Column("encrypted_value", sa.LargeBinary),
        sa.Column("description", sa.String),
        sa.Column("updated_at", sa.Float, nullable=False),
    )
