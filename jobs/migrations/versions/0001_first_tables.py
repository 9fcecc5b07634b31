"""Create the tables of the job store."""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "jobs1"
down_revision = None


def _where(condition: str) -> dict[str, Any]:
    return {f"{dialect}_where": sa.text(condition) for dialect in ("sqlite", "postgresql")}


def upgrade() -> None:
    op.create_table(
        "jobs",
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("pipeline", sa.String),
        sa.Column("head", sa.String),
        sa.Column("state", sa.String, nullable=False),
        sa.Column("spec", sa.Text, nullable=False),
        sa.Column("payload", sa.Text),
        sa.Column("outcome", sa.Text),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("run_after", sa.Float, nullable=False),
        sa.Column("started_at", sa.Float),
        sa.Column("ended_at", sa.Float),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("num_lost", sa.Integer, nullable=False),
        sa.Column("owner", sa.String),
        sa.Column("lease_until", sa.Float),
        sa.Column("handle", sa.Text),
        sa.Column("cancel_requested", sa.Boolean, nullable=False),
        sa.Column("by_hand", sa.Boolean, nullable=False),
        sa.Column("waits_for", sa.Text),
        sa.Column("handled_at", sa.Float),
        sqlite_autoincrement=True,
    )
    for name, state, columns in (
        ("one_pending_job_per_pipeline", "SCHEDULING", ["pipeline", "by_hand"]),
        ("one_running_job_per_pipeline", "RUNNING", ["pipeline"]),
    ):
        op.create_index(name, "jobs", columns, unique=True, **_where(f"state = '{state}'"))
    op.create_index("jobs_by_pipeline", "jobs", ["pipeline", "number"])
    op.create_index("jobs_by_state", "jobs", ["state", "run_after"])
    op.create_index("jobs_by_head", "jobs", ["head"])
    to_handle = _where("ended_at IS NOT NULL AND handled_at IS NULL")
    op.create_index("jobs_to_handle", "jobs", ["ended_at"], **to_handle)
    op.create_table(
        "deliveries",
        sa.Column("source", sa.String, primary_key=True),
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("arrival", sa.Integer, nullable=False),
        sa.Column("body", sa.Text, nullable=False),
        sa.Column("announced", sa.String),
        sa.Column("received_at", sa.Float, nullable=False),
        sa.Column("job_number", sa.Integer),
        sa.Column("ignored_reason", sa.Text),
        sa.CheckConstraint(
            "(job_number IS NULL) <> (ignored_reason IS NULL)", name="delivery_has_one_answer"
        ),
    )
    op.create_index("deliveries_by_job", "deliveries", ["job_number", "arrival"])
    op.create_index("deliveries_by_arrival", "deliveries", ["arrival"])
    op.create_index("deliveries_by_commit", "deliveries", ["announced"])
    op.create_table(
        "pauses",
        sa.Column("pipeline", sa.String, primary_key=True),
        sa.Column("since", sa.Float, nullable=False),
    )
    changes = op.create_table("changes", sa.Column("number", sa.Integer, primary_key=True))
    op.bulk_insert(changes, [{"number": 0}])
