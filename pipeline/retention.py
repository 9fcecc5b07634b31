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
from pipeline.hub.webhooks import jobs_of_webhooks
from pipeline.paths import Home
from pipeline.retrain.job_folder import CHECKPOINTS_DIR
from pipeline.settings import Settings
from serving.errors import ReleaseError
from serving.weights.atomic_file import is_replacement
from serving.weights.release_store import load_release, release_ids

logger = logging.getLogger(__name__)

KEEP_JOBS_DAYS = 90.0
KEEP_JOBS = 1000
"""This many of the newest jobs of each pipeline stay in the store, however old they are. This many
of the newest plain commands (jobs of no pipeline) stay too."""
RETRAINING = "pipeline.retrain"
"""The Python module that the command of the built-in retraining runs. Only jobs with this command
have checkpoints that `remove_unneeded_files` may remove."""


def prune(settings: Settings, home: Home, store: JobStore) -> list[str]:
    """Remove the folders of old jobs, and delete very old jobs from the job store. But if a release
    that a job made still exists, this job and its folder stay. Returns the names of the removed
    folders.

    Raises OSError if the manifest of a release cannot be read. The job that made the release is
    then not known, so nothing is removed. Also raises OSError if a folder cannot be removed,
    HubError if the hub's webhooks cannot be read, and StoreError.
    """
    kept = {
        job_id
        for folder in home.releases_dir.glob("*/")
        for release_id in release_ids(folder)
        if (job_id := _job_of(folder / release_id)) is not None
    }
    removed = prune_job_folders(store, home.jobs_dir, keep_days=settings.jobs.keep_days, kept=kept)
    forget_jobs(store, settings, home, kept=kept)
    return removed


def _job_of(release: Path) -> str | None:
    """The id of the job that made the release. None if no job made the release, or if its manifest
    is damaged or gone. Raises OSError if the manifest cannot be read."""
    try:
        return load_release(release).lineage.job_id
    except ReleaseError as error:
        if isinstance(error.__cause__, OSError):
            raise error.__cause__ from None
        logger.warning("the job of a damaged release is not known: %s", error)
        return None


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
    schedule = sum(settings.hub.delivery_schedule_seconds)
    return max(
        KEEP_JOBS_DAYS,
        settings.jobs.keep_days,
        settings.hub.keep_deliveries_days + schedule / 86400,
    )
