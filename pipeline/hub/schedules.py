"""Scheduled jobs: when the next run is due, and the loop that submits the runs. All schedules are
in UTC."""

import asyncio
import logging
import time
from datetime import UTC, datetime

from cronsim import CronSim, CronSimError
from sqlalchemy import select, update

from jobs.errors import JobNotFound
from jobs.job import Delivery
from jobs.spec import JobSpec
from jobs.store import JobStore
from pipeline.hub.database import Database
from pipeline.hub.database import scheduled_jobs as table
from pipeline.hub.errors import BadRequest

logger = logging.getLogger(__name__)

LABEL = "scheduled-job"
"""The label of a run has the id of its scheduled job."""
_CHECK_SECONDS, _SECONDS_AFTER_ERROR = 1.0, 30.0
_ALIASES = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@hourly": "0 * * * *",
}


def next_run(schedule: str, after: float) -> float:
    """The first time of the schedule after `after`; both are seconds since the epoch. Raises
    BadRequest if the schedule is wrong, or has no time at all, such as the 30th of February."""
    try:
        times = CronSim(_ALIASES.get(schedule, schedule), datetime.fromtimestamp(after, UTC))
        return next(times).timestamp()
    except (CronSimError, StopIteration):
        raise BadRequest(
            f"schedule: {schedule!r} is not a schedule: write {', '.join(_ALIASES)}, or a cron "
            "expression in UTC such as '0 9 * * 1' (minute, hour, day, month, day of the week)."
        ) from None


def _is_running(store: JobStore, job_id: str | None) -> bool:
    try:
        return job_id is not None and not store.get(job_id).has_ended
    except JobNotFound:  # it was old, and is deleted
        return False


def start_due(database: Database, store: JobStore, now: float) -> None:
    """Submits what is due. Of the runs that were missed while the hub did not run, only one."""
    with database.read() as connection:
        due = connection.execute(select(table).where(table.c.next_run_at <= now)).all()
    for each in due:
        changes: dict[str, object] = {"next_run_at": next_run(each.schedule, now)}
        if next_run(each.schedule, each.next_run_at) <= now:
            since = datetime.fromtimestamp(each.next_run_at, UTC)
            said = "scheduled job %s: runs since %s were missed; one run replaces them"
            logger.warning(said, each.id, since)
        if _is_running(store, each.last_job_id):
            logger.warning(
                "scheduled job %s: a run is left out, because its last one, %s, has not ended",
                *(each.id, each.last_job_id),
            )
        else:
            spec = JobSpec.model_validate(each.spec)
            labels = {**spec.labels, LABEL: each.id}
            # If the hub is killed before the next write, it does this again, and the store makes no
            # second job of the same delivery.
            delivery = Delivery(source=f"schedule/{each.id}", id=str(each.next_run_at))
            job = store.submit(spec.model_copy(update={"labels": labels}), delivery=delivery)
            changes |= {"last_job_id": job.id, "last_run_at": job.created_at}
        with database.write() as connection:
            connection.execute(update(table).where(table.c.id == each.id).values(changes))


async def keep_schedules(database: Database, store: JobStore) -> None:
    """Submits the runs when they are due, until it is cancelled."""
    while True:
        pause = _CHECK_SECONDS
        # After an error, the next time may succeed, for example when the disk has room again.
        try:
            await asyncio.to_thread(start_due, database, store, time.time())
        except Exception:
            logger.exception("cannot start the scheduled jobs that are due")
            pause = _SECONDS_AFTER_ERROR
        await asyncio.sleep(pause)
