"""The lines that `pipeline up` prints about jobs."""

from pathlib import Path

import pytest

from jobs.errors import StoreError
from jobs.job import Job
from jobs.outcome import JobOutcome, OutcomeResult
from jobs.spec import JobSpec
from jobs.store import JobStore
from pipeline.doctor.facts import Journal, advice_after_refusal
from tests.jobs_fixtures import claim


def test_after_an_error_of_the_store_the_next_call_returns_the_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*, limit: int) -> list[Job]:
        raise StoreError("the disk is full")

    with JobStore.open(tmp_path / "jobs.sqlite") as store:
        journal = Journal(store)
        job = store.submit(JobSpec(command=("true",)))
        with monkeypatch.context() as patched:
            patched.setattr(store, "list", fails)
            with pytest.raises(StoreError):
                journal.news()
        assert journal.news() == [f"{job.id}  true  scheduling"]
        assert journal.news() == []


@pytest.mark.parametrize(
    ("later", "is_told"),
    [
        ("failed", True),
        ("cancelled", True),
        ("superseded", True),
        ("promoted", False),
        ("published", False),
        ("unchanged", False),
    ],
)
def test_a_refusal_is_told_until_a_later_job_has_decided_about_the_rows(
    tmp_path: Path, later: OutcomeResult, is_told: bool
) -> None:
    outcomes = (
        JobOutcome(result="rejected", dataset_revision="c0ffee" * 6),
        JobOutcome(result=later, dataset_revision="bad" * 13),
    )
    with JobStore.open(tmp_path / "jobs.sqlite") as store:
        for outcome in outcomes:
            store.submit(JobSpec(command=("true",), pipeline="facts"))
            store.finish(claim(store).id, "me", outcome)
        advice = advice_after_refusal(store.list(pipeline="facts"))
    assert ("the gate rejected c0ffeec0ffee" in (advice or "")) is is_told
