"""What an `outcome.json` that cannot be used means, however the job's process has ended."""

import errno
from dataclasses import replace
from pathlib import Path

import pytest

from jobs.folder import OUTCOME
from jobs.job import Job
from jobs.launcher import Status
from jobs.outcome import JobOutcome
from jobs.outcome_of_exit import Lost, outcome_of_exit
from jobs.spec import JobSpec
from jobs.store import JobStore

EXITED = Status(phase="exited", exit_code=1)
KILLED = Status(phase="exited", exit_code=-9)
VANISHED = Status(phase="vanished")


@pytest.fixture
def job(tmp_path: Path) -> Job:
    with JobStore.open(tmp_path / "jobs.sqlite") as store:
        return store.submit(JobSpec(command=("train",), pipeline="faq")).job


@pytest.mark.parametrize(
    ("stop_reason", "result"), [(None, "failed"), ("cancel", "cancelled"), ("timeout", "failed")]
)
def test_a_half_written_outcome(
    job: Job, tmp_path: Path, stop_reason: str | None, result: str
) -> None:
    (tmp_path / OUTCOME).write_text('{"resu')
    found = outcome_of_exit(job, tmp_path, EXITED, stop_reason=stop_reason, time_limit=3.0)
    assert isinstance(found, JobOutcome) and found.result == result
    assert (OUTCOME in str(found.reason)) == (stop_reason is None)


@pytest.mark.parametrize(
    ("status", "stop_reason"),
    [(KILLED, None), (VANISHED, None), (EXITED, "shutdown")],
    ids=["killed by others", "vanished", "stopped with its runner"],
)
def test_an_attempt_that_was_interrupted_while_it_wrote_the_outcome_is_lost(
    job: Job, tmp_path: Path, status: Status, stop_reason: str | None
) -> None:
    (tmp_path / OUTCOME).write_text('{"resu')
    found = outcome_of_exit(job, tmp_path, status, stop_reason=stop_reason, time_limit=None)
    assert isinstance(found, Lost)


def test_a_plain_command_that_was_killed_while_it_wrote_the_outcome_fails_by_the_signal(
    job: Job, tmp_path: Path
) -> None:
    (tmp_path / OUTCOME).write_text('{"resu')
    plain = replace(job, spec=JobSpec(command=("train",)))
    found = outcome_of_exit(plain, tmp_path, KILLED, stop_reason=None, time_limit=None)
    assert isinstance(found, JobOutcome) and found.result == "failed"
    assert "signal 9" in str(found.reason) and OUTCOME not in str(found.reason)


def test_an_outcome_that_cannot_be_read_now_is_not_judged(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_bytes(path: Path) -> bytes:
        raise OSError(errno.EMFILE, "Too many open files", str(path))

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    with pytest.raises(OSError, match="Too many open files"):
        outcome_of_exit(job, tmp_path, EXITED, stop_reason=None, time_limit=None)
