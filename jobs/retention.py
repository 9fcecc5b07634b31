"""Deletes old jobs and their deliveries from the store. This module searches without the store's
write lock, and it deletes in small transactions. So submissions never wait long for the lock."""

from collections.abc import Collection, Iterator, Sequence

from sqlalchemy import Connection, Engine, delete, select

from jobs.job import TRANSITIONS
from jobs.rows import job_id_of
from jobs.schema import DELIVERIES, JOBS, reading, writing

BATCH = 100
"""One transaction deletes at most this many jobs, with all their deliveries."""
_ENDED_STATES = tuple(state for state, following in TRANSITIONS.items() if not following)


def forget_jobs(
    engine: Engine, before: float, *, newest: int, kept: Collection[str]
) -> Sequence[str]:
    """See `JobStore.forget`."""
    with reading(engine) as connection:
        deleted = [
            number
            for number in _old_jobs(connection, before, newest)
            if job_id_of(number) not in kept
        ]
    for start in range(0, len(deleted), BATCH):
        numbers = deleted[start : start + BATCH]
        with writing(engine) as connection:
            connection.execute(delete(DELIVERIES).where(DELIVERIES.c.job_number.in_(numbers)))
            connection.execute(delete(JOBS).where(JOBS.c.number.in_(numbers)))
    return [job_id_of(number) for number in deleted]


def _old_jobs(connection: Connection, before: float, newest: int) -> Iterator[int]:
    """The numbers of the jobs that ended before the time `before`, lowest first. Leaves out the
    last `newest` jobs of each pipeline, and the last `newest` plain commands."""
    # The condition on `ended_at` alone would select the right jobs, but there is no index on
    # `ended_at`, so the database would read all jobs that have ended. The condition on `run_after`
    # makes the database use an index. A job normally ends after its `run_after`. So if `ended_at`
    # is smaller than `before`, `run_after` normally is smaller too, and the query finds the job.
    # There is one exception: a job that ended while it waited for its first or its next attempt may
    # have ended before its `run_after`. Such a job is deleted a little later than other jobs.
    old = select(JOBS.c.number, JOBS.c.pipeline).where(
        JOBS.c.state.in_(_ENDED_STATES), JOBS.c.run_after < before, JOBS.c.ended_at < before
    )
    oldest_kept: dict[str | None, int] = {}
    for number, pipeline in connection.execute(old.order_by(JOBS.c.number)).all():
        if pipeline not in oldest_kept:
            kept = (
                select(JOBS.c.number)
                .where(JOBS.c.pipeline.is_not_distinct_from(pipeline))
                .order_by(JOBS.c.number.desc())
                .offset(newest - 1)
                .limit(1)
            )
            oldest_kept[pipeline] = connection.scalar(kept) or 0
        if number < oldest_kept[pipeline]:
            yield number
