"""Webhooks that are suspended, webhooks that start jobs, replays under a new id."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("webhooks", sa.Column("job_id", sa.String))
    op.add_column("webhooks", sa.Column("encrypted_secrets", sa.LargeBinary))
    for counter in ("num_failures", "num_probes"):
        op.add_column(
            "webhooks", sa.Column(counter, sa.Integer, nullable=False, server_default="0")
        )
    for time in ("failing_since", "suspended_at", "probe_at"):
        op.add_column("webhooks", sa.Column(time, sa.Float))
    op.add_column("deliveries", sa.Column("replay_of", sa.String))
