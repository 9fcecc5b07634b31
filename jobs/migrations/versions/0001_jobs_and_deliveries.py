"""Create the tables of jobs and deliveries."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "jobs",
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("pipeline", sa.String),
        sa.Column("dedupe_key", sa.String),
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
        sqlite_autoincrement=True,
    )
    for name, state in (
        ("one_pending_job_per_pipeline", "SCHEDULING"),
        ("one_running_job_per_pipeline", "RUNNING"),
    ):
        where = sa.text(f"state = '{state}'")
        op.create_index(
            name, "jobs", ["pipeline"], unique=True, sqlite_where=where, postgresql_where=where
        )
    op.create_index("jobs_by_pipeline", "jobs", ["pipeline", "number"])
    op.create_index("jobs_by_state", "jobs", ["state", "run_after"])
    op.create_index("jobs_by_dedupe_key", "jobs", ["dedupe_key"])
    op.create_table(
        "deliveries",
        sa.Column("source", sa.String, primary_key=True),
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("body", sa.Text, nullable=False),
        sa.Column("received_at", sa.Float, nullable=False),
        sa.Column("job_number", sa.Integer),
        sa.Column("ignored_reason", sa.Text),
        sa.CheckConstraint(
            "(job_number IS NULL) <> (ignored_reason IS NULL)", name="delivery_has_one_answer"
        ),
    )
    op.create_index("deliveries_by_job", "deliveries", ["job_number"])
