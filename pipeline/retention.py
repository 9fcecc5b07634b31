"""Cleans up after jobs that have ended. Removes the checkpoints of a retraining at once, and the
folder of a job after `keep_days` (a setting under `[jobs]`). Deletes the job from the job store
after at least KEEP_JOBS_DAYS."""

import logging
import shutil
import time
from collections.abc import Collection, Sequence
from pathlib import Path

from jobs.folder import STALE, is_temporary_file
from jobs.job import Job
from jobs.store import JobStore
from pipeline.hub.webhooks.store import jobs_of_webhooks
from pipeline.paths import Home
from pipeline.retrain.job_folder import CHECKPOINTS_DIR
from pipeline.settings import Settings
from serving.weights.atomic_file import is_replacement

logger = logging.getLogger(__name__)


KEEP_JOBS_DAYS = 90.0
KEEP_JOBS = 1000
"""This many of the newest jobs of each pipeline stay in the store, however old they are. This many
of the newest plain commands (jobs of no pipeline) stay too."""
RETRAINING = "pipeline.retrain"
"""The Python module that the command of the built-in retraining runs. Only jobs with this command
have checkpoints that `remove_unneeded_files` may remove."""


def remove_unneeded_files(job: Job, job_dir: Path) -> None:
    """Remove files that only a running job needs. Call this when the job has ended. If the job is a
    built-in retraining, this function removes the job's checkpoints, because only another attempt
    of the job would need them. If the user's own trainer wrote a folder `checkpoints`, this folder
    stays.

    For every job, this function removes temporary files that killed processes have left in the
    folder: those of hotpush's own writers, and no others.
    """
    if RETRAINING in job.spec.command:
        shutil.rmtree(job_dir / CHECKPOINTS_DIR, ignore_errors=True)
    for path in job_dir.glob(".*"):
        if (is_temporary_file(path.name) or is_replacement(path.name)) and not path.is_dir():
            path.unlink(missing_ok=True)


def prune_job_folders(
    store: JobStore, jobs_dir: Path, *, keep_days: float, kept: Collection[str] = ()
) -> list[str]:
    """Remove the folders of jobs that ended more than `keep_days` ago; returns the names of the
    removed folders.

    The jobs and their outcomes stay in the store. `kept` has the ids of jobs whose folders stay.

    After a database was lost, a new job may get the id of an old job. `prepare_job_folder`
    (`jobs/folder.py`) then renames the folder of the old job. This function also removes a renamed
    folder if the modification time of the folder itself is more than `keep_days` ago. (This time
    changes when a file is added to the folder or removed, not when a file is written to.)
    """
    before = time.time() - 86400 * keep_days
    removed = []
    for job_id in store.ids_ended_before(before):
        if job_id not in kept and (jobs_dir / job_id).is_dir():
            shutil.rmtree(jobs_dir / job_id)
            removed.append(job_id)
    for folder in jobs_dir.glob(f"j*{STALE}*"):
        if folder.stat().st_mtime < before:
            shutil.rmtree(folder)
            removed.append(folder.name)
    if removed:
        logger.info("removed the folders of %d jobs: %s", len(removed), ", ".join(removed))
    return removed


def forget_jobs(
    store: JobStore, settings: Settings, home: Home, *, kept: Collection[str] = ()
) -> Sequence[str]:
    """Delete old jobs and deliveries from the store; returns the ids of the deleted jobs.

    Four groups of old jobs stay: the jobs in `kept`, the jobs that a webhook copies (`--job-id` of
    `pipeline webhooks`), the newest KEEP_JOBS jobs of each pipeline, and the newest KEEP_JOBS plain
    commands. Raises HubError if the hub's webhooks cannot be read.
    """
    forgotten = store.forget(
        store.now() - 86400 * remembered_days(settings),
        newest=KEEP_JOBS,
        kept={*kept, *jobs_of_webhooks(home.hub_dir / "hub.sqlite")},
    )
    if forgotten:
        logger.info(
            "deleted %d old jobs from the store, %s to %s",
            len(forgotten),
            forgotten[0],
            forgotten[-1],
        )
    return forgotten


def remembered_days(settings: Settings) -> float:
    """How many days jobs and deliveries stay in the store: at least KEEP_JOBS_DAYS, and at least
    `keep_days`.

    The store must also keep a delivery for as long as the hub may retry it or a person may replay
    it. Otherwise the receiver would take the repeated delivery for a new one.
    """
    schedule = sum(settings.hub.delivery_schedule_seconds) * (1 + settings.hub.delivery_jitter)
    return max(
        KEEP_JOBS_DAYS,
        settings.jobs.keep_days,
        settings.hub.keep_deliveries_days + schedule / 86400,
    )
