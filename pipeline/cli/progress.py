"""Follows one job: a bar for each of its stages on a terminal, elsewhere a line."""

import contextlib
import time
from collections.abc import Iterator
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.text import Text

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
    with _progress(console) as progress:
        stages = _Stages(console, progress)
        while True:
            # The job before its metrics: what it wrote before it ended is then never missed.
            job = store.get(job_id)
            stages.follow_state(job)
            metrics, offset = read_metrics(metrics_file, offset)
            for metric in metrics:
                stages.follow_metric(metric)
            if job.ended_at is not None:
                stages.end(job.ended_at)
                return job
            if deadline is not None and time.monotonic() > deadline:
                return job
            if read_stack(home) is not None or (job.lease_until or 0) > time.time():
                last_seen = time.monotonic()
            elif time.monotonic() - last_seen > ABSENCE_SECONDS:
                raise PipelineError(
                    f"nothing runs jobs any more, so {job.id} stays {job.state}; it goes on with "
                    "the next `pipeline up`"
                )
            time.sleep(POLL_SECONDS)


@contextlib.contextmanager
def _progress(console: Console) -> Iterator[Progress | None]:
    """Bars; None where nothing that moves can be shown."""
    if not console.is_terminal or console.quiet:
        yield None
        return
    columns = (TextColumn("{task.description:>10}"), BarColumn(bar_width=32), _Took())
    with Progress(*columns, TextColumn("{task.fields[note]}"), console=console) as progress:
        yield progress


class _Took(ProgressColumn):
    """What a stage has taken by the job's own account, however late one looks at it."""

    def render(self, task: Task) -> Text:
        until = task.fields["ended"] or time.time()
        return Text(str(timedelta(seconds=int(until - task.fields["began"]))))


class _Stages:
    """What the job is at: waiting, running, or, by its metrics, a stage of the retraining."""

    def __init__(self, console: Console, progress: Progress | None) -> None:
        self._console = console
        self._progress = progress
        self._name: str | None = None
        self._is_over = False
        self._began = 0.0
        """Unix time, as all times here."""
        self._note = ""
        self._bar: TaskID | None = None

    def follow_state(self, job: Job) -> None:
        if self._name is None:
            self._begin("waiting", job.created_at, job.id)
        if self._name == "waiting" and job.started_at is not None:
            self.end(job.started_at)
            self._begin("running", job.started_at)

    def follow_metric(self, metric: Metric) -> None:
        if metric.stage != self._name or (self._is_over and metric.event == "start"):
            if self._name == "running":
                self._forget()
            self.end(metric.time)
            self._begin(metric.stage, metric.time)
        if metric.event == "step" and metric.loss is not None:
            self._note = f"loss {metric.loss:.3f}"
            if self._progress is not None and self._bar is not None:
                self._progress.update(
                    self._bar, total=metric.steps, completed=metric.step or 0, note=self._note
                )
        elif metric.event == "end":
            self.end(metric.time)

    def end(self, at: float) -> None:
        """Without effect on a stage that has ended."""
        if self._is_over:
            return
        self._is_over = True
        if self._progress is None:
            took = f"{at - self._began:8.1f} s"
            self._console.print(f"{self._name:>10}  {took}  {self._note}".rstrip())
        elif self._bar is not None:
            self._progress.update(self._bar, total=1, completed=1, ended=at)
            self._progress.stop_task(self._bar)

    def _begin(self, name: str, at: float, note: str = "") -> None:
        self._name, self._began, self._note, self._is_over = name, at, note, False
        if self._progress is not None:
            self._bar = self._progress.add_task(name, total=None, note=note, began=at, ended=None)

    def _forget(self) -> None:
        """What has stages is shown by them."""
        self._is_over = True
        if self._progress is not None and self._bar is not None:
            self._progress.remove_task(self._bar)
