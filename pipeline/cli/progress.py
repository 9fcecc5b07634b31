"""Finds one job, shows its output or its stages until the job has ended, and prints it as JSON or
text.

Each stage that has ended is a line of text. On a terminal, a last line says how far the present
stage is. Elsewhere (in a file, for example), a long stage has such a line from time to time.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Any, BinaryIO

import typer
from rich.console import Console
from rich.status import Status
from rich.text import Text

from jobs.folder import is_of_another_job, read_log
from jobs.job import Job
from jobs.store import JobStore
from pipeline.doctor.facts import describe, how_far
from pipeline.errors import PipelineError
from pipeline.paths import Home
from pipeline.retrain.job import Metric, read_metrics
from pipeline.runner.job_store import reading_jobs
from pipeline.settings import load_settings
from pipeline.stack.record import read_stack

JobArgument = Annotated[str | None, typer.Argument(help="A job's id, as `jobs ls` shows it.")]
LatestOption = Annotated[bool, typer.Option("--latest", help="Use the newest job.")]
EXIT_CODES = {"failed": 1, "rejected": 3, "superseded": 4, "cancelled": 5}
"""Outcome of a job → exit code of `jobs run` and `jobs wait`; 0 for all other outcomes. The exit
code is also 1 if `jobs run` or `jobs wait` itself fails. It is 2 if the command line is wrong, and
124 if the time of `jobs wait --timeout` is over. If a plain command (a job of no pipeline) failed,
`exit_code` returns the command's own exit code instead."""
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
    store: JobStore,
    job_id: str,
    home: Home,
    output: BinaryIO | None,
    deadline: float | None = None,
    offset: int = 0,
) -> Job:
    """Copy the job's output to `output`, from the byte `offset` on, until the job has ended, or
    until `deadline` (monotonic clock; None for no limit). If `output` is None, only wait.

    Returns the job. If the deadline came first, the job has not ended. Raises PipelineError if no
    runner is up that could run the job.
    """
    folder, told = home.jobs_dir / job_id, None

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
            self._how_far = how_far(metric) or ""
        elif metric.event in ("measured", "answered") and metric.rows is not None:
            done = metric.measured or 0
            left = self._time_left(metric.event, metric.time, done, metric.rows)
            self._how_far = f"{how_far(metric)}{left}"
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


def reading_store(home: Home) -> JobStore:
    return reading_jobs(load_settings(), home)


def find_job(store: JobStore, job_id: str | None, latest: bool) -> Job:
    """The job with this id, or the newest job if `latest` is set.

    Raises PipelineError if there is no job yet. Also raises PipelineError if both `job_id` and
    `latest` are given, or neither of them. Raises JobNotFound for an unknown id.
    """
    if (job_id is None) is not latest:
        raise PipelineError("name one job by its id, or use --latest")
    jobs = store.list(limit=1)
    if not jobs:
        raise no_job_yet()
    return jobs[0] if job_id is None else store.get(job_id)


def no_job_yet() -> PipelineError:
    return PipelineError("there is no job yet; push to the dataset, or run: pipeline jobs run")


def as_record(job: Job) -> dict[str, Any]:
    """The job as a dict that can be written as JSON."""
    return asdict(job) | {
        "spec": job.spec.model_dump(mode="json"),
        "outcome": job.outcome.model_dump(mode="json") if job.outcome else None,
        "last_failure": job.last_failure.model_dump(mode="json") if job.last_failure else None,
    }


def counts_text(job: Job) -> str:
    """One line with the job's counts, such as how many changed rows the new weights have learned.
    Empty if the job counted no rows."""
    if job.outcome is None or job.outcome.counts is None:
        return ""
    return str(job.outcome.counts)


def seconds_text(job: Job) -> str:
    """The seconds that the job took, or has taken so far; empty before it has started."""
    if job.started_at is None:
        return ""
    return f"{(job.ended_at or time.time()) - job.started_at:.1f}"


def follow_to_end(
    store: JobStore, job: Job, home: Home, *, quiet: bool, deadline: float | None = None
) -> Job:
    """Show a job until it has ended; returns the ended job. For a pipeline's job, this shows the
    stages. For a plain command, it shows the command's output. With `quiet`, it shows nothing.

    If the job has not ended at `deadline` (monotonic clock), this raises a `typer.Exit`, which ends
    the `pipeline` command with exit code 124. If `deadline` is None, there is no limit.
    """
    if job.spec.pipeline is None:
        output = None if quiet else sys.stdout.buffer
        ended = follow_output(store, job.id, home, output, deadline)
    else:
        console = Console(quiet=quiet, highlight=False)
        ended = follow_stages(store, job.id, home, console, deadline)
    if not ended.has_ended:
        raise timed_out(f"{ended.id} is still {ended.state}")
    return ended


def timed_out(what: str) -> typer.Exit:
    """Print that the time is over, and print the text `what`, such as `j000012 is still RUNNING`.
    Returns the exception that the caller must raise."""
    print(f"pipeline: the time is over, and {what}", file=sys.stderr)
    return typer.Exit(124)


def report_end(job: Job, as_json: bool) -> None:
    """Print how the job ended. If the exit code for its outcome is not 0, raise a `typer.Exit` with
    this code.

    For a plain command, this prints to stderr, because the command's own output is on stdout.
    """
    if as_json:
        print(json.dumps(as_record(job)))
    else:
        print(describe(job), file=sys.stderr if job.spec.pipeline is None else sys.stdout)
    if code := exit_code(job):
        raise typer.Exit(code)


def exit_code(job: Job) -> int:
    """The exit code for the job's outcome. If the ended job has no outcome, this is 0, because its
    command succeeded without writing an outcome.

    If a plain command failed, this is the command's own exit code. If a signal ended a plain
    command, this is 128 plus the number of the signal, as in a shell.
    """
    if job.outcome is None:
        return 0
    code = job.outcome.exit_code
    if job.spec.pipeline is None and code and job.outcome.result == "failed":
        return code if code > 0 else 128 - code
    return EXIT_CODES.get(job.outcome.result, 0)
