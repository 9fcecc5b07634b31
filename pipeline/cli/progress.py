"""Shows the output or the stages of one job until the job has ended. Each stage that has ended is a
line of text. On a terminal, a last line says how far the present stage is. Elsewhere (in a file,
for example), a long stage has such a line from time to time."""

import sys
import time
from collections.abc import Callable
from typing import BinaryIO

from rich.console import Console
from rich.status import Status
from rich.text import Text

from jobs.folder import is_of_another_job, read_log
from jobs.job import Job
from jobs.store import JobStore
from pipeline.errors import PipelineError
from pipeline.paths import Home
from pipeline.retrain.job import Metric, read_metrics
from pipeline.stack.record import read_stack

POLL_SECONDS = 0.1
NO_RUNNER_SECONDS = 15.0
"""Give up waiting for a job if no runner was up for this many seconds. The number must be larger
than the seconds that a runner takes to start: `jobs run --detach` returns before its runner is up,
and the user may call `jobs wait` right after that."""
LINE_SECONDS = 15.0
"""Not on a terminal: at least this many seconds lie between two lines that say how far a stage
is."""


def follow_stages(
    store: JobStore, job_id: str, home: Home, console: Console, deadline: float | None = None
) -> Job:
    """Show the job's stages until the job has ended, or until `deadline` (monotonic clock; None for
    no limit).

    Returns the job. If the deadline came first, the job has not ended. Raises PipelineError if no
    runner is up that could run the job.
    """
    metrics_file = home.jobs_dir / job_id / "metrics.jsonl"
    offset = 0
    with console.status("") as status:
        stages = _StageDisplay(console, status)

        def show(job: Job) -> None:
            nonlocal offset
            stages.follow_state(job)
            if is_of_another_job(metrics_file.parent, job.identity):
                return
            metrics, offset = read_metrics(metrics_file, offset)
            for metric in metrics:
                stages.follow_metric(metric)
            if job.ended_at is not None:
                stages.end(job.ended_at)
            stages.show_how_far()

        return _watch(store, job_id, home, show, deadline)


def follow_output(
    store: JobStore, job_id: str, home: Home, output: BinaryIO | None, deadline: float | None = None
) -> Job:
    """Copy the job's output to `output` until the job has ended, or until `deadline` (monotonic
    clock; None for no limit). If `output` is None, only wait.

    Returns the job. If the deadline came first, the job has not ended. Raises PipelineError if no
    runner is up that could run the job.
    """
    folder, offset = home.jobs_dir / job_id, 0
    told = None

    def show(job: Job) -> None:
        nonlocal offset, told
        if output is not None and job.waits_for not in (None, told):
            print(f"waits: {job.waits_for}", file=sys.stderr)
            told = job.waits_for
        while output is not None and (text := read_log(folder, job.identity, offset)):
            offset += len(text)
            output.write(text)
            output.flush()

    return _watch(store, job_id, home, show, deadline)


def _watch(
    store: JobStore, job_id: str, home: Home, show: Callable[[Job], None], deadline: float | None
) -> Job:
    last_seen = time.monotonic()
    while True:
        # Read the job's row in the store first, and the files in the job's folder after that. If
        # the row says that the job has ended, the files are already complete, so `show` also shows
        # the last lines of the files.
        job = store.get(job_id)
        show(job)
        if job.has_ended or (deadline is not None and time.monotonic() > deadline):
            return job
        if read_stack(home) is not None or (job.lease_until or 0) > time.time():
            last_seen = time.monotonic()
        elif time.monotonic() - last_seen > NO_RUNNER_SECONDS:
            raise PipelineError(
                f"no runner is up, so {job.id} stays {job.state}; to continue the job: pipeline up"
            )
        time.sleep(POLL_SECONDS)


class _StageDisplay:
    """Shows what the job does now: `waiting` until the job starts, then `running` until the job's
    metrics file names the first stage, and from then on the name of the stage."""

    def __init__(self, console: Console, status: Status) -> None:
        self._console = console
        self._status = status
        """The last line on a terminal."""
        self._name: str | None = None
        self._is_over = False
        self._began = 0.0
        """When the stage began. All times in this class are Unix time."""
        self._note = ""
        self._how_far = ""
        self._first: dict[str, tuple[float, int]] = {}
        """Event → the time of its first metric in this stage, and how much was done then."""
        self._seen_at = self._printed_at = 0.0

    def follow_state(self, job: Job) -> None:
        if self._name is None:
            self._begin("waiting", job.created_at, job.id)
        if job.waits_for is not None and self._how_far != (note := f"waits: {job.waits_for}"):
            self._how_far = note
            if not self._console.is_terminal:
                self._print(time.time(), note)
        if self._name == "waiting" and job.started_at is not None:
            self.end(job.started_at)
            self._begin("running", job.started_at)

    def follow_metric(self, metric: Metric) -> None:
        if metric.stage != self._name or (self._is_over and metric.event == "start"):
            if self._name == "running":  # the stages replace it
                self._is_over = True
            self.end(metric.time)
            self._begin(metric.stage, metric.time)
        if metric.event == "step" and metric.loss is not None:
            self._note = f"loss {metric.loss:.3f}"
            self._how_far = f"step {metric.step} of at most {metric.steps}, {self._note}"
        elif metric.event in ("measured", "answered") and metric.rows is not None:
            done = metric.measured or 0
            left = self._time_left(metric.event, metric.time, done, metric.rows)
            self._how_far = f"{done} of {metric.rows} rows{left}"
            if metric.event == "answered":
                self._how_far = f"the base model answers: {done} of {metric.rows} prompts{left}"
            if done == 0:
                self._printed_at = 0.0  # tell at once what takes long
        elif metric.event == "end":
            self.end(metric.time)
        self._seen_at = metric.time

    def show_how_far(self) -> None:
        """Say how far the stage is; not on a terminal, only if a line is due. If several metrics
        were read together, first pass all of them to `follow_metric`, and then call this once.
        Otherwise a user who begins to follow a stage late would get many lines at once."""
        if self._is_over:
            return
        if self._console.is_terminal:
            self._status.update(Text(self._line(time.time(), self._how_far or self._note)))
        elif self._how_far and self._seen_at - self._printed_at >= LINE_SECONDS:
            self._print(self._seen_at, self._how_far)
            self._printed_at = self._seen_at

    def end(self, at: float) -> None:
        """Show the end of the stage. Does nothing if the stage has already ended."""
        if not self._is_over:
            self._is_over = True
            self._print(at, self._note)

    def _time_left(self, event: str, now: float, done: int, rows: int) -> str:
        """An estimate from the speed since the first event of this kind; empty before there is a
        speed, and at the end."""
        first = self._first.setdefault(event, (now, done))
        if done in (first[1], rows) or now - first[0] < 1:
            return ""
        seconds = (now - first[0]) / (done - first[1]) * (rows - done)
        about = f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
        return f", about {about} left"

    def _line(self, at: float, text: str) -> str:
        return f"{self._name:>10}  {at - self._began:8.1f} s  {text}".rstrip()

    def _print(self, at: float, text: str) -> None:
        self._console.print(self._line(at, text), soft_wrap=True)

    def _begin(self, name: str, at: float, note: str = "") -> None:
        self._name, self._began, self._note, self._is_over = name, at, note, False
        self._how_far, self._printed_at, self._first = "", at, {}
