"""A bar that follows one retraining job: its stages and the training loss."""

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from jobs.record import Job
from jobs.store import JobStore
from pipeline.errors import PipelineError
from pipeline.paths import Home
from pipeline.retrain.metrics import Metric, read_metrics
from pipeline.stack import read_stack

POLL_SECONDS = 0.1
ABSENCE_SECONDS = 15.0
"""A detached runner takes a moment to start."""


def follow(
    store: JobStore, job_id: str, home: Home, console: Console, deadline: float | None = None
) -> Job:
    """Show the job until it has ended, or until `deadline` of the monotonic clock; returns it.

    Raises PipelineError once nothing is up that could run it.
    """
    metrics_file = home.jobs_dir / job_id / "metrics.jsonl"
    offset = 0
    last_seen = time.monotonic()
    with Progress(
        TextColumn("{task.description:>10}"),
        BarColumn(bar_width=32),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
    ) as progress:
        stages = _Stages(progress, job_id)
        while True:
            # The job before its metrics: what it wrote before it ended is then never missed.
            job = store.get(job_id)
            metrics, offset = read_metrics(metrics_file, offset)
            for metric in metrics:
                stages.show(metric)
            if job.has_ended or (deadline is not None and time.monotonic() > deadline):
                stages.end()
                return job
            if read_stack(home) is not None or (job.lease_until or 0) > time.time():
                last_seen = time.monotonic()
            elif time.monotonic() - last_seen > ABSENCE_SECONDS:
                raise PipelineError(
                    f"nothing runs jobs any more, so {job.id} stays {job.state}; it goes on with "
                    "the next `pipeline up`"
                )
            time.sleep(POLL_SECONDS)


class _Stages:
    """A line per stage, the current one moving."""

    def __init__(self, progress: Progress, job_id: str) -> None:
        self._progress = progress
        self._name = "waiting"
        self._bar: TaskID | None = progress.add_task("waiting", total=None, note=job_id)

    def show(self, metric: Metric) -> None:
        if metric.stage != self._name:
            self.end()
            self._name = metric.stage
            self._bar = self._progress.add_task(metric.stage, total=None, note="")
        if metric.event == "step" and self._bar is not None and metric.loss is not None:
            self._progress.update(
                self._bar,
                total=metric.steps,
                completed=metric.step or 0,
                note=f"loss {metric.loss:.3f}",
            )
        elif metric.event == "end":
            self.end()

    def end(self) -> None:
        if self._bar is not None:
            self._progress.update(self._bar, total=1, completed=1)
            self._progress.stop_task(self._bar)
            self._bar = None
