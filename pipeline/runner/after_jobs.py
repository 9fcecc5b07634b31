"""Does the work that follows the end of a job, in a thread of the runner's process.

When a job ends, the thread counts the outcome (how the job ended) in the runner's metrics for
Prometheus. It also removes files that only a running job needs, and hands the outcome to the
command of the setting `on_outcome`. Once an hour, it removes the folders of jobs after `keep_days`
(a setting under `[jobs]`), and deletes jobs from the job store after at least KEEP_JOBS_DAYS.
"""

import json
import logging
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Histogram, start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from jobs.errors import JobError, StoreError
from jobs.job import Job
from jobs.process import process_here
from jobs.spec import LOCAL
from jobs.store import JobStore
from pipeline.hub.database import jobs_of_webhooks
from pipeline.paths import Home
from pipeline.retrain import checkpoint_store
from pipeline.retrain.job import CHECKPOINTS_DIR
from pipeline.runner.job_store import open_job_store
from pipeline.runner.submit import RETRAINING
from pipeline.settings import SETTINGS_COPY, PipelineSettings, Settings
from serving.errors import ReleaseError
from serving.weights.atomic_file import REPLACING
from serving.weights.release_store import load_release, release_ids

logger = logging.getLogger(__name__)

PRUNE_SECONDS = 3600.0
POLL_SECONDS = 0.2
RETRY_SECONDS = 5.0
"""After an error, `Outcomes.follow` waits this long before it tries again."""
TIMEOUT_SECONDS = 30.0
TAKEN_SECONDS = 300.0
"""If a runner dies while it handles an outcome, another one does it again after this time."""
AWAY_SECONDS = 60.0
"""A runner of another machine handles an outcome if none on the job's machine has for so long. It
cannot remove the files there."""
LOOK_SECONDS = 30.0
"""The longest time between two looks for outcomes of runners that are gone."""
KEEP_JOBS_DAYS = 90.0
_SECONDS = (0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600, 14400)


@contextmanager
def after_jobs(settings: Settings, home: Home, *, serves_metrics: bool) -> Iterator[None]:
    """Run the thread that the module's docstring describes, until the `with` block ends. Before the
    thread stops, it looks once more for ended jobs and handles their outcomes. So no outcome is
    missed.

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
                said = "metrics cannot use port %d (%s); set another metrics_port under [jobs]"
                logger.warning(said, settings.jobs.metrics_port, error.strerror)
        outcomes = Outcomes(
            store,
            (
                metrics.count,
                lambda job: remove_unneeded_files(job, home.jobs_dir / job.id),
                lambda job: _notify(settings, home, job),
            ),
        )
        remove_old = partial(prune, settings, home, store)
        thread = threading.Thread(target=outcomes.follow, args=(stop, remove_old), name="outcomes")
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


def _notify(settings: Settings, home: Home, job: Job) -> None:
    for pipeline in settings.pipelines:
        if pipeline.name == job.spec.pipeline:
            notify(pipeline, job, home.jobs_dir / job.id)


class Outcomes:
    """Calls every handler for each job that ends. The job store records which outcomes were
    handled. Every outcome is handled at least once. If the process is killed, an outcome may be
    handled twice."""

    def __init__(self, store: JobStore, handlers: Sequence[Callable[[Job], None]]) -> None:
        self._store = store
        self._handlers = handlers

    def poll(self) -> None:
        """Handle each ended job that was not handled yet.

        If a handler raises an exception, this method logs the exception. The outcome counts as
        handled, so the handler is not called again. Raises StoreError.
        """
        away = self._store.now() - AWAY_SECONDS
        for job in self._store.unhandled():
            is_mine = _is_here(job) or job.ended_at is None or job.ended_at < away
            # Take each one just before its handlers, because those of others may take minutes.
            if not is_mine or not self._store.take_outcome(job.id, TAKEN_SECONDS):
                continue
            for handler in self._handlers:
                try:
                    handler(job)
                except Exception:
                    logger.exception(
                        "a handler failed for the outcome of %s", job.id, extra={"job_id": job.id}
                    )
            self._store.handled(job.id)

    def follow(self, stop: threading.Event, prune: Callable[[], None]) -> None:
        """Call `poll` when the store has changed, and `prune` at once and then every hour. If one
        of them fails, log the error, and call it again at its next time. When `stop` is set, call
        `poll` one last time and return."""
        has_changed, next_look, next_prune = True, 0.0, 0.0
        while True:
            is_last = stop.wait(POLL_SECONDS)
            try:
                has_changed |= self._store.has_changed()
                if has_changed or is_last or time.monotonic() >= next_look:
                    next_look = time.monotonic() + LOOK_SECONDS
                    self.poll()
                has_changed = False
                if time.monotonic() >= next_prune:
                    next_prune = time.monotonic() + PRUNE_SECONDS
                    prune()
            except Exception as error:
                # If the thread ended here, nobody would handle the later outcomes.
                logger.error(
                    "outcomes cannot be handled or old jobs removed now; trying again later: %s",
                    error,
                    exc_info=not isinstance(error, JobError | OSError),
                )
                stop.wait(RETRY_SECONDS)
            if is_last:
                return


def _is_here(job: Job) -> bool:
    """Whether the job's folder is on this machine, or does not matter."""
    is_local = job.spec.launcher == LOCAL and job.handle is not None
    return not is_local or process_here(job.handle or "") is not None


# Metrics


class RunnerMetrics(Collector):
    """The metrics, in a registry of their own. The counters begin at 0 each time a runner starts.
    Prometheus detects that a counter was reset, and still computes the right rates."""

    def __init__(self, store: JobStore) -> None:
        self._store = store
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self._outcomes = Counter(
            "pipeline_outcomes",
            "Jobs that ended, by outcome",
            ["pipeline", "result"],
            registry=self.registry,
        )
        self._job_seconds = Histogram(
            "pipeline_job_seconds",
            "Seconds from the start of a job to its outcome, whatever the outcome is",
            ["pipeline"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._commit_to_serving = Histogram(
            "pipeline_commit_to_serving_seconds",
            "Seconds from the arrival of a job's first commit until its release was served",
            ["pipeline"],
            buckets=_SECONDS,
            registry=self.registry,
        )

    def count(self, job: Job) -> None:
        """Count the outcome of a job that has ended. Does nothing for a job of no pipeline, and for
        a job without an outcome. Raises StoreError."""
        if job.outcome is None or job.spec.pipeline is None or job.ended_at is None:
            return
        name = job.spec.pipeline
        self._outcomes.labels(name, job.outcome.result).inc()
        if job.started_at is not None:
            self._job_seconds.labels(name).observe(job.ended_at - job.started_at)
        if job.outcome.result == "promoted" and not job.by_hand:  # no commit arrived for it
            self._commit_to_serving.labels(name).observe(
                job.ended_at - self._store.waited_since(job)
            )

    def serve(self, port: int) -> None:
        """Serve the metrics on loopback, in a thread that ends with the process. Raises OSError."""
        start_http_server(port, addr="127.0.0.1", registry=self.registry)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Measures how long commits have waited, each time Prometheus asks for the metrics. The
        times come from the job store, because the runner's memory would be lost if the runner was
        killed."""
        age = GaugeMetricFamily(
            "pipeline_queue_age_seconds",
            "Seconds that the oldest waiting commit has waited for its job to start",
            labels=["pipeline"],
        )
        try:
            now = self._store.now()
            pending = self._store.list(state="SCHEDULING")
            since = [(job.spec.pipeline or "", self._store.waited_since(job)) for job in pending]
        except StoreError:
            # Return no sample, because missing metrics are better than wrong numbers. A monitor can
            # notice that metrics are missing.
            return
        # Prometheus allows only one sample for each set of labels, so a pipeline has one sample for
        # all its jobs.
        for name in dict(since):
            age.add_metric([name], now - min(moment for each, moment in since if each == name))
        yield age


# `on_outcome`


def notify(pipeline: PipelineSettings, job: Job, job_dir: Path) -> None:
    """Run the command `on_outcome`, which gets the job's outcome as JSON on its standard input.
    Does nothing if `on_outcome` is not set, or if the job has no outcome.

    If the command fails, this function logs a warning. It raises no error, because the job has
    already ended.
    """
    command = pipeline.on_outcome
    if command is None or job.outcome is None:
        return
    ids = {"pipeline": pipeline.name, "job_id": job.id}
    body = json.dumps({"pipeline": pipeline.name, **job.outcome.model_dump(mode="json")})
    # Leave out the variable that names the stack's copy of the settings file. Otherwise a
    # `pipeline` command in the user's command would read the copy instead of the settings file.
    of_runner = {name: each for name, each in os.environ.items() if name != SETTINGS_COPY}
    of_job = {"JOB_ID": job.id, "JOB_DIR": str(job_dir), "PIPELINE_OUTCOME": job.outcome.result}
    try:
        done = subprocess.run(
            command,
            input=body.encode(),
            env={**of_runner, **of_job},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
        if done.returncode != 0:
            words = done.stderr.decode(errors="replace").strip().splitlines()
            said = f": {words[-1]}" if words else ""
            raise OSError(f"{command[0]} exited with {done.returncode}{said}")
    except Exception as error:
        logger.warning(
            "on_outcome of %s failed for %s: %s", pipeline.name, job.id, error, extra=ids
        )
    else:
        logger.info("on_outcome of %s received the outcome of %s", pipeline.name, job.id, extra=ids)


# Old jobs


def prune(settings: Settings, home: Home, store: JobStore) -> None:
    """Remove the folders of old jobs, and delete very old jobs, with their deliveries, from the job
    store.

    If a release that a job made still exists, this job and its folder stay. The jobs that a webhook
    copies (`--job-id` of `pipeline webhooks`) stay in the store.

    Raises OSError if the manifest of a release cannot be read. The job that made the release is
    then not known, so nothing is removed. Also raises OSError if a folder cannot be removed, and
    StoreError.
    """
    kept = {
        job_id
        for folder in home.releases_dir.glob("*/")
        for release_id in release_ids(folder)
        if (job_id := _job_of(folder / release_id)) is not None
    }
    prune_job_folders(store, home.jobs_dir, keep_days=settings.jobs.keep_days, kept=kept)
    forgotten = store.forget(
        store.now() - 86400 * remembered_days(settings),
        {*kept, *jobs_of_webhooks(home.hub_dir, settings.hub.database)},
    )
    if forgotten:
        said = "deleted %d old jobs from the store, %s to %s"
        logger.info(said, len(forgotten), forgotten[0], forgotten[-1])


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
    of the job would need them, also those in `checkpoint_url`, and records that were never
    completed. If the user's own trainer wrote a folder `checkpoints`, this folder stays."""
    if RETRAINING in job.spec.command:
        shutil.rmtree(job_dir / CHECKPOINTS_DIR, ignore_errors=True)
        for abandoned in job_dir.glob(f"{REPLACING}*"):  # by an attempt that was killed
            abandoned.unlink(missing_ok=True)
        if url := job.spec.settings.get("train", {}).get("checkpoint_url"):
            checkpoint_store.remove(f"{url}/{job.id}")


def prune_job_folders(
    store: JobStore, jobs_dir: Path, *, keep_days: float, kept: Collection[str] = ()
) -> None:
    """Remove the folders of jobs that ended more than `keep_days` ago.

    The jobs and their outcomes stay in the store. `kept` has the ids of jobs whose folders stay.
    """
    before = store.now() - 86400 * keep_days
    removed = []
    for job_id in store.ids_ended_before(before):
        if job_id not in kept and (jobs_dir / job_id).is_dir():
            shutil.rmtree(jobs_dir / job_id)
            removed.append(job_id)
    if removed:
        logger.info("removed the folders of %d jobs: %s", len(removed), ", ".join(removed))


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
