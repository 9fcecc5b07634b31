"""What is removed of jobs that have ended: checkpoints at once, the whole folder after a time."""

import logging
import shutil
import time
from collections.abc import Collection
from pathlib import Path

from jobs.folder import STALE
from jobs.record import Job
from jobs.store import JobStore
from pipeline.retrain.job_folder import CHECKPOINTS_DIR

logger = logging.getLogger(__name__)


RETRAINING = "pipeline.retrain"
"""The module in the command of a job whose folder this knows its way about in."""


def clear(job: Job, job_dir: Path) -> None:
    """Remove what only a next attempt would have needed, and files whose writer was killed. What a
    trainer of one's own calls `checkpoints` stays."""
    if RETRAINING in job.spec.command:
        shutil.rmtree(job_dir / CHECKPOINTS_DIR, ignore_errors=True)
    for path in job_dir.glob(".*.[0-9]*"):
        path.unlink(missing_ok=True)


def prune_job_folders(
    store: JobStore, jobs_dir: Path, *, keep_days: float, kept: Collection[str] = ()
) -> list[str]:
    """Remove the folders of jobs that ended more than `keep_days` ago; returns their ids.

    The job stays in the list of jobs, with its outcome. `kept` are those of releases that are
    still there. Folders that were put aside, since another database's job had their id, go too.
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
