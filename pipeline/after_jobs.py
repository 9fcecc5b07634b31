"""The thread beside the runner: tells and counts outcomes, clears folders, prunes once an hour."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from jobs.errors import StoreError
from jobs.record import Job
from jobs.store import JobStore
from pipeline import on_outcome, retention
from pipeline.job_store import open_job_store
from pipeline.outcomes import Outcomes
from pipeline.paths import Home
from pipeline.runner_metrics import RunnerMetrics
from pipeline.settings import Settings
from serving.weights.releases import list_releases

logger = logging.getLogger(__name__)

PRUNE_SECONDS = 3600.0


@contextmanager
def after_jobs(settings: Settings, home: Home, *, serves_metrics: bool) -> Iterator[None]:
    """See to what follows outcomes until the block ends, those of its last jobs included."""
    stop = threading.Event()
    with open_job_store(settings, home) as store:
        metrics = RunnerMetrics(store)
        if serves_metrics and settings.jobs.metrics_port:
            try:
                metrics.serve(settings.jobs.metrics_port)
            except OSError as error:
                # Jobs matter more than being measured.
                logger.warning(
                    "no metrics on port %d (%s): free it, or set metrics_port under [jobs]",
                    settings.jobs.metrics_port,
                    error.strerror,
                )
        outcomes = Outcomes(
            store,
            home.jobs_dir / "outcomes.json",
            (metrics.count, lambda job: _clear(home, job), lambda job: _tell(settings, home, job)),
        )
        outcomes.begin()  # before the runner's first job ends
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


def _clear(home: Home, job: Job) -> None:
    retention.clear(job, home.jobs_dir / job.id)


def _tell(settings: Settings, home: Home, job: Job) -> None:
    for pipeline in settings.pipelines:
        if pipeline.name == job.spec.pipeline:
            on_outcome.tell(pipeline, job, home.jobs_dir / job.id)


def _prune_hourly(settings: Settings, home: Home, store: JobStore, stop: threading.Event) -> None:
    while True:
        try:
            prune(settings, home, store)
        except (StoreError, OSError) as error:
            logger.error("old job folders are removed later: %s", error)
        if stop.wait(PRUNE_SECONDS):
            return


def prune(settings: Settings, home: Home, store: JobStore) -> list[str]:
    """Remove old job folders, but not those of jobs whose release is still there."""
    kept = {
        release.lineage.job_id
        for folder in home.releases_dir.glob("*/")
        for release in list_releases(folder)
        if release.lineage.job_id is not None
    }
    return retention.prune_job_folders(
        store, home.jobs_dir, keep_days=settings.jobs.keep_days, kept=kept
    )
