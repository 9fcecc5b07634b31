"""Names that repositories had before they moved, and tokens."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "former_names",
        sa.Column("type", sa.String, primary_key=True),
        sa.Column("owner", sa.String, primary_key=True),
        sa.Column("name", sa.String, primary_key=True),
        sa.Column(
            "repository_id",
            sa.String,
            sa.ForeignKey("repositories.id", ondelete="CASCADE"),
            nullable=False,
            index=True,
        ),
    )
    op.create_table(
        "tokens",
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("name", sa.String, nullable=False, unique=True),
        sa.Column("digest", sa.String, nullable=False, unique=True),
        sa.Column("role", sa.String, nullable=False),
        sa.Column("repositories", sa.JSON),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("last_used_at", sa.Float),
    )
