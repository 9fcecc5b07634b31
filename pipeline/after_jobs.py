"""Does the work that follows the end of a job, in threads of the runner's process.

When a job ends, the first thread counts the outcome (how the job ended) in the metrics. It also
removes files that only a running job needs, and sends the outcome to the URL or the command that
the setting `on_outcome` names. Once an hour, the second thread removes the folders of old jobs, and
deletes very old jobs from the job store.
"""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jobs.errors import StoreError
from jobs.job import Job
from jobs.store import JobStore
from pipeline import on_outcome, retention
from pipeline.hub.errors import HubError
from pipeline.job_store import open_job_store
from pipeline.outcomes import Outcomes
from pipeline.paths import Home
from pipeline.runner_metrics import RunnerMetrics
from pipeline.settings import Settings
from serving.errors import ReleaseError
from serving.weights.release_store import load_release, release_ids

logger = logging.getLogger(__name__)

PRUNE_SECONDS = 3600.0


@contextmanager
def after_jobs(settings: Settings, home: Home, *, serves_metrics: bool) -> Iterator[None]:
    """Run the two threads that the module's docstring describes, until the `with` block ends.
    Before the first thread stops, it looks once more for ended jobs and handles their outcomes. So
    no outcome is missed.

    With `serves_metrics`, also serve the runner's metrics, unless the setting `metrics_port` is 0.
    Raises StoreError.
    """
    stop = threading.Event()
    with open_job_store(settings, home) as store:
        metrics = RunnerMetrics(store)
        if serves_metrics and settings.jobs.metrics_port:
            try:
                metrics.serve(settings.jobs.metrics_port)
            except OSError as error:
                # Continue, because jobs can run without metrics.
                logger.warning(
                    "metrics cannot use port %d (%s): free the port, or set another metrics_port "
                    "under [jobs]",
                    settings.jobs.metrics_port,
                    error.strerror,
                )
        outcomes = Outcomes(
            store,
            (
                metrics.count,
                lambda job: _remove_unneeded_files(home, job),
                lambda job: _notify(settings, home, job),
            ),
        )
        threads = [
            threading.Thread(target=outcomes.follow, args=(stop,), name="outcomes"),
            threading.Thread(
                target=_prune_hourly, args=(settings, home, store, stop), name="prune"
            ),
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            stop.set()
            for thread in threads:
                thread.join()


def _remove_unneeded_files(home: Home, job: Job) -> None:
    retention.remove_unneeded_files(job, home.jobs_dir / job.id)


def _notify(settings: Settings, home: Home, job: Job) -> None:
    for pipeline in settings.pipelines:
        if pipeline.name == job.spec.pipeline:
            on_outcome.notify(pipeline, job, home.jobs_dir / job.id)


def _prune_hourly(settings: Settings, home: Home, store: JobStore, stop: threading.Event) -> None:
    while True:
        try:
            prune(settings, home, store)
        except (StoreError, HubError, OSError) as error:
            logger.error("old jobs cannot be removed now; trying again in an hour: %s", error)
        except Exception:
            # If the thread ended here, no old job would be removed until the next start.
            logger.exception("old jobs cannot be removed; trying again in an hour")
        if stop.wait(PRUNE_SECONDS):
            return


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
    removed = retention.prune_job_folders(
        store, home.jobs_dir, keep_days=settings.jobs.keep_days, kept=kept
    )
    retention.forget_jobs(store, settings, home, kept=kept)
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
