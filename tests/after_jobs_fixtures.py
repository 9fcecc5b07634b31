"""A store of jobs, and jobs that have ended."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs.job import Job
from jobs.outcome import JobOutcome, OutcomeResult
from jobs.spec import JobSpec
from jobs.store import JobStore


@pytest.fixture
def store(tmp_path: Path) -> Iterator[JobStore]:
    with JobStore.open(tmp_path / "jobs.sqlite") as store:
        yield store


def end_one(
    store: JobStore, result: OutcomeResult = "promoted", pipeline: str | None = "facts"
) -> Job:
    job = store.submit(JobSpec(command=("true",), pipeline=pipeline))
    assert store.claim("me", 60) is not None
    return store.finish(job.id, "me", JobOutcome(result=result, job_id=job.id))
