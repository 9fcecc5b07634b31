"""What a person is told after the gate has rejected a job."""

from pathlib import Path

import pytest

from jobs.outcome import JobOutcome, OutcomeResult
from jobs.spec import JobSpec
from jobs.store import JobStore
from pipeline.doctor.facts import advice_after_refusal
from tests.jobs_fixtures import claim


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
