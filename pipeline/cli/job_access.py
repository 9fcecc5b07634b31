"""Functions that several `pipeline jobs` commands use: they open the job store, find one job, show
its progress until it has ended, and print it as JSON or text."""

import json
import sys
import time
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console

from jobs.job import Job
from jobs.store import JobStore
from pipeline.cli.progress import follow_output, follow_stages
from pipeline.doctor.facts import describe
from pipeline.errors import PipelineError
from pipeline.paths import Home
from pipeline.runner.job_store import open_job_store, reading_jobs
from pipeline.settings import load_settings

JobArgument = Annotated[str | None, typer.Argument(help="A job's id, as `jobs ls` shows it.")]
LatestOption = Annotated[bool, typer.Option("--latest", help="Use the newest job.")]
EXIT_CODES = {"failed": 1, "rejected": 3, "superseded": 4, "cancelled": 5}
"""Outcome of a job → exit code of `jobs run` and `jobs wait`; 0 for all other outcomes. The exit
code is also 1 if `jobs run` or `jobs wait` itself fails. It is 2 if the command line is wrong, and
124 if the time of `jobs wait --timeout` is over. If a plain command (a job of no pipeline) failed,
`exit_code` returns the command's own exit code instead."""


def open_store(home: Home) -> JobStore:
    return open_job_store(load_settings(), home)


def reading_store(home: Home) -> AbstractContextManager[JobStore | None]:
    return reading_jobs(load_settings(), home)


def find_job(store: JobStore | None, job_id: str | None, latest: bool) -> tuple[JobStore, Job]:
    """The store, and one job in it: the job with this id, or the newest job if `latest` is set.

    Raises PipelineError if there is no job yet. Also raises PipelineError if both `job_id` and
    `latest` are given, or neither of them. Raises JobNotFound for an unknown id.
    """
    if (job_id is None) is not latest:
        raise PipelineError("name one job by its id, or use --latest")
    jobs = [] if store is None else store.list(limit=1)
    if store is None or not jobs:
        raise no_job_yet()
    return store, jobs[0] if job_id is None else store.get(job_id)


def no_job_yet() -> PipelineError:
    return PipelineError("there is no job yet; push to the dataset, or run: pipeline jobs run")


def as_record(job: Job) -> dict[str, Any]:
    """The job as a dict that can be written as JSON."""
    return asdict(job) | {
        "spec": job.spec.model_dump(mode="json"),
        "outcome": job.outcome.model_dump(mode="json") if job.outcome else None,
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
