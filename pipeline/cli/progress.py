"""Shows the output or the stages of one job until the job has ended. On a terminal, the last line
says what the job does now. Elsewhere (in a file, for example), a long stage repeatedly prints a
line that says how far the stage is."""

import contextlib
import sys
import time
from collections.abc import Callable
from typing import BinaryIO

from rich.console import Console
from rich.status import Status

from jobs.job import Job
from jobs.logs import is_of_another_job, read_log
from jobs.store import JobStore
from pipeline.errors import PipelineError
from pipeline.paths import Home
from pipeline.retrain.metrics import Metric, read_metrics
from pipeline.stack_record import read_stack

POLL_SECONDS = 0.1
NO_RUNNER_SECONDS = 15.0
"""Give up waiting for a job if no runner was up for this many seconds. The number must be larger
than the seconds that a runner takes to start: `jobs run --detach` returns before its runner is up,
and the user may call `jobs wait` right after that."""
CLAIM_SECONDS = 2.0
"""A job that has waited for less than this waits only for the runner to see it."""
LINE_SECONDS = 15.0
"""At least this many seconds lie between two lines that say how far a stage is."""


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
    with contextlib.ExitStack() as stack:
        is_live = console.is_terminal and not console.quiet
        stages = _Stages(console, stack.enter_context(console.status("")) if is_live else None)

        def show(job: Job) -> None:
            nonlocal offset
            stages.follow_state(job, _waits_for(store, job))
            if not is_of_another_job(metrics_file.parent, job):
                metrics, offset = read_metrics(metrics_file, offset)
                for metric in metrics:
                    stages.follow_metric(metric)
                if job.ended_at is not None:
                    stages.end(job.ended_at)
            stages.show_how_far()

        return _watch(store, job_id, home, show, deadline)


def follow_output(
    store: JobStore,
    job_id: str,
    home: Home,
    output: BinaryIO | None,
    deadline: float | None = None,
) -> Job:
    """Copy the job's output to `output` until the job has ended, or until `deadline` (monotonic
    clock; None for no limit). If `output` is None, only wait.

    Returns the job. If the deadline came first, the job has not ended. Raises PipelineError if no
    runner is up that could run the job.
    """
    offset = 0
    told = None

    def show(job: Job) -> None:
        nonlocal offset, told
        if output is not None and (other := _waits_for(store, job)) not in (None, told):
            print(f"waits for {other}", file=sys.stderr)
            told = other
        while output is not None and (text := read_log(home.jobs_dir, job, offset)):
            offset += len(text)
            output.write(text)
            output.flush()

    return _watch(store, job_id, home, show, deadline)


def _watch(
    store: JobStore,
    job_id: str,
    home: Home,
    show: Callable[[Job], None],
    deadline: float | None,
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


def _waits_for(store: JobStore, job: Job) -> str | None:
    """The id of the running job because of which this job has not started; None if it waits for
    nothing but the runner."""
    if job.state != "SCHEDULING" or time.time() - job.created_at < CLAIM_SECONDS:
        return None
    running = store.list(state="RUNNING")
    of_pipeline = [each for each in running if each.spec.pipeline == job.spec.pipeline]
    return next((each.id for each in (*of_pipeline, *running)), None)


class _Stages:
    """What the job does now: `waiting` until the job starts, then `running` until the job's metrics
    file names the first stage, and from then on the name of the stage. All times are Unix time, and
    come from the records of the job."""

    def __init__(self, console: Console, status: Status | None) -> None:
        self._console = console
        self._status = status
        self._name = ""
        self._is_over = False
        self._note = self._how_far = ""
        self._began = self._seen_at = self._printed_at = 0.0

    def follow_state(self, job: Job, waits_for: str | None) -> None:
        if not self._name:
            self._begin("waiting", job.created_at, job.id)
        if waits_for is not None and self._how_far != (note := f"waits for {waits_for}"):
            self._how_far, self._seen_at, self._printed_at = note, time.time(), 0.0
        if self._name == "waiting" and job.started_at is not None:
            self.end(job.started_at)
            self._begin("running", job.started_at)

    def follow_metric(self, metric: Metric) -> None:
        if metric.stage != self._name or (self._is_over and metric.event == "start"):
            if self._name != "running":
                self.end(metric.time)
            self._begin(metric.stage, metric.time)
        if metric.event == "step" and metric.loss is not None:
            self._note = f"loss {metric.loss:.3f}"
            self._how_far = f"step {metric.step} of at most {metric.steps}, {self._note}"
        elif metric.event == "measured" and metric.rows is not None:
            self._how_far = f"{metric.measured or 0} of {metric.rows} rows"
        elif metric.event == "answered" and metric.rows is not None:
            done = metric.measured or 0
            self._how_far = f"the base model answers: {done} of {metric.rows} prompts"
            if done == 0:
                self._printed_at = 0.0  # tell at once what takes long
        elif metric.event == "end":
            self.end(metric.time)
        self._seen_at = metric.time

    def show_how_far(self) -> None:
        """Call this once after several metrics were read together. Otherwise a user who begins to
        follow a stage late would get many lines at once: one for every 15 s of the stage."""
        if self._is_over:
            return
        if self._status is not None:
            self._status.update(self._line(time.time(), self._how_far))
        elif self._how_far and self._seen_at - self._printed_at >= LINE_SECONDS:
            self._print(self._seen_at, self._how_far)
            self._printed_at = self._seen_at

    def end(self, at: float) -> None:
        """Show the end of the stage. Does nothing if the stage has already ended."""
        if not self._is_over:
            self._is_over = True
            self._print(at, self._note)

    def _begin(self, name: str, at: float, note: str = "") -> None:
        self._name, self._began, self._note, self._is_over = name, at, note, False
        self._how_far, self._seen_at, self._printed_at = "", at, at

    def _line(self, at: float, text: str) -> str:
        return f"{self._name:>10}  {at - self._began:8.1f} s  {text}".rstrip()

    def _print(self, at: float, text: str) -> None:
        self._console.print(self._line(at, text), soft_wrap=True)
