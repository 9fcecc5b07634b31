"""Add two columns, `jobs.by_hand` and `job_deliveries.new_sha`.

`by_hand` marks a job that a person submitted. (Of the jobs that are already in the store, only
pending ones get the mark.) A pipeline may now have two pending jobs: one created by pushes, and one
submitted by hand. `new_sha` is the commit that a delivery announced.
"""

import json

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"

JOBS = sa.table("jobs", *map(sa.column, ("number", "state", "spec", "payload", "by_hand")))
LINKS = sa.table(
    "job_deliveries", *map(sa.column, ("job_number", "delivery_id", "arrival", "new_sha"))
)


def upgrade() -> None:
    op.add_column(
        "jobs", sa.Column("by_hand", sa.Boolean, nullable=False, server_default=sa.false())
    )
    op.add_column("job_deliveries", sa.Column("new_sha", sa.String))
    op.drop_index("one_pending_job_per_pipeline", "jobs")
    where = sa.text("state = 'SCHEDULING'")
    op.create_index(
        "one_pending_job_per_pipeline",
        "jobs",
        ["pipeline", "by_hand"],
        unique=True,
        sqlite_where=where,
        postgresql_where=where,
    )
    op.create_index("job_deliveries_by_commit", "job_deliveries", ["new_sha"])
    connection = op.get_bind()
    _mark_jobs_by_hand(connection)
    _name_newest_commits(connection)


def _mark_jobs_by_hand(connection: sa.Connection) -> None:
    """Mark the pending jobs that were submitted by hand. In the payload of such a job, the id of
    the webhook is `by-hand`. Two kinds of jobs are not marked: a job that also has a delivery of a
    push, and a job whose payload the person gave, because it cannot be recognised."""
    pending = sa.select(JOBS.c.number, JOBS.c.payload).where(
        JOBS.c.state == "SCHEDULING",
        JOBS.c.number.not_in(sa.select(LINKS.c.job_number)),
    )
    for job in connection.execute(pending).all():
        webhook = json.loads(job.payload or "{}").get("webhook") or {}
        if webhook.get("id") == "by-hand":
            mark = sa.update(JOBS).where(JOBS.c.number == job.number)
            connection.execute(mark.values(by_hand=True))


def _name_newest_commits(connection: sa.Connection) -> None:
    """For each job, take the delivery that arrived last, and set its `new_sha` to the job's newest
    commit. In rare cases, this delivery announced an older commit; its `new_sha` is then wrong. The
    commits of the job's other deliveries are not known, so their `new_sha` stays NULL."""
    newest = (
        sa.select(LINKS.c.job_number, sa.func.max(LINKS.c.arrival).label("arrival"))
        .group_by(LINKS.c.job_number)
        .subquery()
    )
    query = sa.select(JOBS.c.number, JOBS.c.spec, newest.c.arrival)
    query = query.join_from(JOBS, newest, newest.c.job_number == JOBS.c.number)
    for job in connection.execute(query).all():
        revisions = json.loads(job.spec)["revisions"]
        if revisions:
            name = sa.update(LINKS).where(
                LINKS.c.job_number == job.number, LINKS.c.arrival == job.arrival
            )
            connection.execute(name.values(new_sha=revisions["new_sha"]))
