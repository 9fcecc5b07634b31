"""Cleans up after ended jobs: removes checkpoints at once, and whole job folders after
`keep_days`."""

import logging
import shutil
import time
from collections.abc import Collection
from pathlib import Path

from jobs.folder import STALE
from jobs.job import Job
from jobs.store import JobStore
from pipeline.retrain.job_folder import CHECKPOINTS_DIR

logger = logging.getLogger(__name__)


RETRAINING = "pipeline.retrain"
"""The module in the command of a retraining job. Checkpoints of other jobs are not removed."""


def remove_unneeded_files(job: Job, job_dir: Path) -> None:
    """Remove the job's checkpoints, which only another attempt would need, and temporary files that
    killed writers left. If the user's own trainer wrote a folder `checkpoints`, the folder
    stays."""
    if RETRAINING in job.spec.command:
        shutil.rmtree(job_dir / CHECKPOINTS_DIR, ignore_errors=True)
    for path in job_dir.glob(".*.[0-9]*"):
        path.unlink(missing_ok=True)


def prune_job_folders(
    store: JobStore, jobs_dir: Path, *, keep_days: float, kept: Collection[str] = ()
) -> list[str]:
    """Remove the folders of jobs that ended more than `keep_days` ago; returns the names of the
    removed folders.

    The job itself stays in the store, with its outcome. The folders of jobs in `kept` stay too.
    Old folders that `prepare_job_folder` has renamed are also removed.
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
