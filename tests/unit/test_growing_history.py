"""What a delivery costs does not grow with those that were stored before it."""

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from sqlite3 import connect

import pytest

from jobs.job import Delivery, JobRequest
from jobs.spec import JobSpec, RevisionRange
from jobs.store import JobStore

BATCH, HISTORY = 16, 4_000


@pytest.fixture
def num_steps(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many instructions SQLite has carried out so far, by all connections: unlike seconds,
    they are the same on every machine."""
    steps = 0

    def count() -> None:
        nonlocal steps
        steps += 1

    def connected(*args: object, **kwargs: object) -> sqlite3.Connection:
        connection: sqlite3.Connection = connect(*args, **kwargs)
        connection.set_progress_handler(count, 1)
        return connection

    monkeypatch.setattr(sqlite3, "connect", connected)
    monkeypatch.setattr(sqlite3.dbapi2, "connect", connected)
    return lambda: steps


def cost(num_steps: Callable[[], int], work: Callable[[], object]) -> int:
    before = num_steps()
    work()
    return num_steps() - before


def test_of_a_job_that_absorbs_them(tmp_path: Path, num_steps: Callable[[], int]) -> None:
    commits = RevisionRange(repo="acme/faq", ref="refs/heads/main", new_sha="a" * 40)
    spec = JobSpec(command=("true",), pipeline="faq", revisions=commits)

    def push(first: int, number: int = BATCH) -> None:
        ids = [f"delivery-{first + place}" for place in range(number)]
        told = [Delivery(source="hub", id=id) for id in ids]
        jobs.submit_all([JobRequest(spec=spec, delivery=delivery) for delivery in told])

    def length_of_its_row() -> int:
        with closing(connect(tmp_path / "jobs.db")) as database:
            (length,) = database.execute("SELECT length(spec) FROM jobs").fetchone()
        return int(length)

    with JobStore.open(tmp_path / "jobs.db") as jobs:
        push(0)
        early, short = cost(num_steps, lambda: push(BATCH)), length_of_its_row()
        push(2 * BATCH, HISTORY)
        late, long = cost(num_steps, lambda: push(2 * HISTORY)), length_of_its_row()
        job = jobs.claim("me", 60)
    assert job is not None and job.spec.revisions is not None
    assert len(job.spec.revisions.delivery_ids) == HISTORY + 3 * BATCH
    assert 0 < late < 1.5 * early
    assert long == short
