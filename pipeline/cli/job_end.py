"""Shows the progress of a job until the job has ended. Then prints the job's outcome, and exits
with the exit code for this outcome."""

import json
import sys
import time
from typing import TYPE_CHECKING

import typer

from pipeline.cli.job_access import as_record
from pipeline.paths import Home

if TYPE_CHECKING:
    from jobs.job import Job
    from jobs.store import JobStore

EXIT_CODES = {
    "promoted": 0,
    "published": 0,
    "unchanged": 0,
    "failed": 1,
    "rejected": 3,
    "superseded": 4,
    "cancelled": 5,
}
"""Outcome of a job → exit code of `jobs run` and `jobs wait`. The exit code is
also 1 if `jobs run` or `jobs wait` itself fails. It is 2 if the command line is wrong, and 124 if
the time of `jobs wait --timeout` is over. If a plain command (a job of no pipeline) failed,
`exit_code` returns the command's own exit code instead."""


def follow_to_end(
    store: "JobStore", job: "Job", home: Home, *, quiet: bool, deadline: float | None = None
) -> "Job":
    """Show a job until it has ended; returns the ended job. For a pipeline's job, this shows the
    stages. For a plain command, it shows the command's output. With `quiet`, it shows nothing.

    If the job has not ended at `deadline` (monotonic clock), this raises a `typer.Exit`, which ends
    the `pipeline` command with exit code 124. If `deadline` is None, there is no limit.
    """
    from rich.console import Console

    from pipeline.cli.progress import follow_output, follow_stages

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


def deadline_in(seconds: float | None) -> float | None:
    return None if seconds is None else time.monotonic() + seconds


def report_end(job: "Job", as_json: bool) -> None:
    """Print how the job ended. If the exit code for its outcome is not 0, raise a `typer.Exit` with
    this code.

    For a plain command, this prints to stderr, because the command's own output is on stdout.
    """
    from pipeline.journal import describe

    if as_json:
        print(json.dumps(as_record(job)))
    else:
        print(describe(job), file=sys.stderr if job.spec.pipeline is None else sys.stdout)
    if code := exit_code(job):
        raise typer.Exit(code)


def exit_code(job: "Job") -> int:
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
    return EXIT_CODES[job.outcome.result]
