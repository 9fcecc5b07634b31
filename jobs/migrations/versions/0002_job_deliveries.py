"""Move the delivery ids of each job from the column `spec` into the new table `job_deliveries`."""

import json

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

JOBS = sa.table("jobs", *map(sa.column, ("number", "pipeline", "spec", "created_at")))
DELIVERIES = sa.table("deliveries", *map(sa.column, ("id", "received_at", "job_number")))


def upgrade() -> None:
    job_deliveries = op.create_table(
        "job_deliveries",
        sa.Column("job_number", sa.Integer, primary_key=True),
        sa.Column("delivery_id", sa.String, primary_key=True),
        sa.Column("arrival", sa.Integer, nullable=False),
        sa.Column("received_at", sa.Float, nullable=False),
    )
    op.create_index("job_deliveries_by_arrival", "job_deliveries", ["arrival"])
    connection = op.get_bind()
    received = _received(connection)
    arrivals: dict[tuple[str | None, str], int] = {}
    for job in connection.execute(sa.select(JOBS).order_by(JOBS.c.number)).all():
        spec = json.loads(job.spec)
        delivery_ids = (spec["revisions"] or {}).get("delivery_ids")
        if not delivery_ids:
            continue
        rows = []
        for delivery_id in delivery_ids:
            # If a job took over a delivery from a failed job, both jobs list the delivery. Both
            # rows must get the same arrival number, because the delivery arrived only once. The
            # number does not depend on the time when a job took the delivery over.
            key = job.pipeline, delivery_id
            row = {
                "job_number": job.number,
                "delivery_id": delivery_id,
                "arrival": arrivals.setdefault(key, len(arrivals) + 1),
                "received_at": received.get(key, job.created_at),
            }
            rows.append(row)
        connection.execute(sa.insert(job_deliveries), rows)
        spec["revisions"]["delivery_ids"] = []
        change = sa.update(JOBS).where(JOBS.c.number == job.number)
        connection.execute(change.values(spec=json.dumps(spec)))


def _received(connection: sa.Connection) -> dict[tuple[str | None, str], float]:
    """When each delivery was first received: (pipeline of its job, delivery id) → time."""
    first = sa.func.min(DELIVERIES.c.received_at)
    query = (
        sa.select(JOBS.c.pipeline, DELIVERIES.c.id, first)
        .join_from(DELIVERIES, JOBS, JOBS.c.number == DELIVERIES.c.job_number)
        .group_by(JOBS.c.pipeline, DELIVERIES.c.id)
    )
    return {
        (pipeline, delivery_id): received_at
        for pipeline, delivery_id, received_at in connection.execute(query)
    }
