"""Functions that several `pipeline jobs` commands use: they open the job store, find one job, and
convert a job to JSON or text."""

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipeline.errors import PipelineError
from pipeline.paths import Home

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from jobs.job import Job
    from jobs.store import JobStore

JobArgument = Annotated[str | None, typer.Argument(help="A job's id, as `jobs ls` shows it.")]
LatestOption = Annotated[bool, typer.Option("--latest", help="Use the newest job.")]


def open_store(home: Home) -> "JobStore":
    from pipeline.job_store import open_job_store
    from pipeline.settings import load_settings

    return open_job_store(load_settings(), home)


def reading_store(home: Home) -> "AbstractContextManager[JobStore | None]":
    from pipeline.job_store import reading_jobs
    from pipeline.settings import load_settings

    return reading_jobs(load_settings(), home)


def find_job(store: "JobStore | None", job_id: str | None, latest: bool) -> "tuple[JobStore, Job]":
    """The store, and one job in it: the job with this id, or the newest job if `latest` is set.

    Raises PipelineError if there is no job yet. Also raises PipelineError if both `job_id` and
    `latest` are given, or neither of them. Raises JobNotFound for an unknown id.
    """
    if (job_id is None) is not latest:
        raise PipelineError("name one job by its id, or use --latest")
    if store is not None and job_id is not None:
        return store, store.get(job_id)
    jobs = store.list(limit=1) if store is not None else []
    if store is None or not jobs:
        raise no_job_yet()
    return store, jobs[0]


def no_job_yet() -> PipelineError:
    return PipelineError("there is no job yet; push to the dataset, or run: pipeline jobs run")


def as_record(job: "Job") -> dict[str, Any]:
    """The job as a dict that can be written as JSON."""
    return asdict(job) | {
        "spec": job.spec.model_dump(mode="json"),
        "outcome": job.outcome.model_dump(mode="json") if job.outcome else None,
    }


def counts_text(job: "Job") -> str:
    """One line with the job's counts, such as how many changed rows the new weights have learned.
    Empty if the job counted no rows."""
    if job.outcome is None or job.outcome.counts is None:
        return ""
    return str(job.outcome.counts)


def seconds_text(job: "Job") -> str:
    """The seconds that the job took, or has taken so far; empty before it has started."""
    if job.started_at is None:
        return ""
    return f"{(job.ended_at or time.time()) - job.started_at:.1f}"
