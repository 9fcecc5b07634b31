"""Failures that can pass are tried again after a wait, and those that cannot are not."""

import errno
import threading

import pytest

from jobs.agent import Attempt, ForkServer
from jobs.errors import LaunchError, is_temporary
from jobs.runner import Runner
from jobs.spec import JobSpec
from tests.job_runner_fixtures import ENVIRONMENT, SETTINGS, House, house, program

__all__ = ["house"]

SOON = SETTINGS.model_copy(update={"retry_seconds": 0.05})


def test_a_failure_that_passes_is_forgotten(house: House) -> None:
    house.run(SOON)
    job = house.ended(house.store.submit(program("fail_for_now", "2")))
    assert (job.state, job.attempt, job.num_lost) == ("COMPLETED", 3, 2)
    assert job.outcome is not None and job.outcome.result == "promoted"


def test_the_exit_code_of_a_trainer_says_that_its_failure_may_pass(house: House) -> None:
    house.run(SOON)
    command = ("sh", "-c", "echo no room; exit 75")
    spec = JobSpec(command=command, pipeline="faq", max_attempts=2)
    job = house.ended(house.store.submit(spec))
    assert (job.state, job.attempt) == ("ERROR", 2) and job.outcome is not None
    assert "no room" in str(job.outcome.reason) and job.outcome.exit_code == 75


@pytest.mark.parametrize(("code", "state"), [(errno.EAGAIN, "COMPLETED"), (errno.EACCES, "ERROR")])
def test_a_failed_fork_is_tried_again(house: House, code: int, state: str) -> None:
    house.jobs_dir.mkdir()
    server = ForkServer(())
    errors = [OSError(code, "no")]

    def fail_at_first(attempt: Attempt) -> None:
        if errors:
            raise LaunchError("No process could be started") from errors.pop()
        server.start(attempt)

    job = house.store.submit(program("write_outcome", "promoted", "0"))
    runner = Runner(house.store, house.jobs_dir, SOON, ENVIRONMENT, start_agent=fail_at_first)
    runner.run(threading.Event(), until_idle=True)
    assert house.store.get(job.id).state == state


def test_which_errors_are_temporary() -> None:
    def caused_by(cause: Exception) -> Exception:
        try:
            raise ValueError("no shard") from cause
        except ValueError as error:
            return error

    full = OSError(errno.ENOSPC, "No space left on device")
    assert is_temporary(full) and is_temporary(caused_by(full)) and is_temporary(MemoryError())
    gone = FileNotFoundError(errno.ENOENT, "No such file")
    assert not is_temporary(gone) and not is_temporary(caused_by(gone))
