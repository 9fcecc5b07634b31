"""What an `outcome.json` that cannot be used means, however the job's process has ended."""

import errno
from dataclasses import replace
from pathlib import Path

import pytest

from jobs.attempt import Exit, Lost, StopReason, outcome_of_exit, record_result
from jobs.folder import OUTCOME
from jobs.job import Job
from jobs.outcome import JobOutcome
from jobs.settings import JobsSettings
from jobs.spec import JobSpec
from jobs.store import JobStore
from tests.jobs_fixtures import claim

EXITED, KILLED, VANISHED = Exit(code=1), Exit(code=-9), Exit()


@pytest.fixture
def job(tmp_path: Path) -> Job:
    with JobStore.open(tmp_path / "jobs.sqlite") as store:
        return store.submit(JobSpec(command=("train",), pipeline="faq"))


@pytest.mark.parametrize(
    ("stop_reason", "result"), [(None, "failed"), ("cancel", "cancelled"), ("timeout", "failed")]
)
def test_a_half_written_outcome(
    job: Job, tmp_path: Path, stop_reason: StopReason | None, result: str
) -> None:
    (tmp_path / OUTCOME).write_text('{"resu')
    found = outcome_of_exit(job, tmp_path, EXITED, stop_reason, 3.0)
    assert isinstance(found, JobOutcome) and found.result == result
    assert (OUTCOME in str(found.reason)) == (stop_reason is None)
    assert found.stage == ("timeout" if stop_reason == "timeout" else None)


@pytest.mark.parametrize(
    ("status", "stop_reason"),
    [(KILLED, None), (VANISHED, None), (EXITED, "shutdown")],
    ids=["killed by others", "vanished", "stopped with its runner"],
)
def test_an_attempt_that_was_interrupted_while_it_wrote_the_outcome_is_lost(
    job: Job, tmp_path: Path, status: Exit, stop_reason: StopReason | None
) -> None:
    (tmp_path / OUTCOME).write_text('{"resu')
    found = outcome_of_exit(job, tmp_path, status, stop_reason, None)
    assert isinstance(found, Lost)


def test_a_plain_command_that_was_killed_while_it_wrote_the_outcome_fails_by_the_signal(
    job: Job, tmp_path: Path
) -> None:
    (tmp_path / OUTCOME).write_text('{"resu')
    plain = replace(job, spec=JobSpec(command=("train",)))
    found = outcome_of_exit(plain, tmp_path, KILLED, None, None)
    assert isinstance(found, JobOutcome) and found.result == "failed"
    assert "signal 9" in str(found.reason) and OUTCOME not in str(found.reason)


def test_want_of_memory_is_named(job: Job, tmp_path: Path) -> None:
    killed = replace(KILLED, memory_ran_out=True)
    lost = outcome_of_exit(job, tmp_path, killed, None, None)
    assert isinstance(lost, Lost) and "because memory ran out" in lost.reason
    plain = replace(job, spec=JobSpec(command=("train",)))
    failed = outcome_of_exit(plain, tmp_path, killed, None, None)
    assert isinstance(failed, JobOutcome) and "because memory ran out" in str(failed.reason)


def test_an_outcome_that_cannot_be_read_now_is_not_judged(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_bytes(path: Path) -> bytes:
        raise OSError(errno.EMFILE, "Too many open files", str(path))

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    with pytest.raises(OSError, match="Too many open files"):
        outcome_of_exit(job, tmp_path, EXITED, None, None)


def test_each_wait_is_four_times_the_one_before(tmp_path: Path) -> None:
    settings = JobsSettings(retry_seconds=10.0)
    now, waits = 1000.0, []
    with JobStore.open(tmp_path / "jobs.sqlite", clock=lambda: now) as store:
        store.submit(JobSpec(command=("train",), pipeline="faq"))
        for _ in range(2):
            job = claim(store)
            result = outcome_of_exit(job, tmp_path, Exit(code=75), None, None)
            ended = record_result(store, job, result, settings)
            waits.append(ended.run_after - now)
            now += waits[-1]
    assert waits == [10.0, 40.0]
