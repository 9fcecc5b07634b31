"""A runner that ends or is killed, with `SIGKILL`, and the next one that takes its jobs over."""

import os
import signal
import time
from pathlib import Path

import pytest

from jobs.folder import OUTCOME
from jobs.job import Job
from jobs.process import process_here
from tests.integration.test_job_kills import children_of
from tests.job_runner_fixtures import SETTINGS, House, house, program
from tests.jobs_fixtures import is_gone, pids_in, until

__all__ = ["house"]


@pytest.mark.parametrize("action", [("sleep_until_stopped",), ("stop_politely", "cancelled")])
def test_a_stopped_runner_leaves_its_jobs_to_the_next(
    house: House, action: tuple[str, ...]
) -> None:
    _, stop, thread = house.run()
    job = house.store.submit(program(*action, max_attempts=1))
    (pid,) = pids_in(house.log(job))
    stop.set()
    thread.join()
    assert is_gone(pid)
    assert house.store.get(job.id).state == "RUNNING"
    house.run()
    assert pids_in(house.log(job), 2)[0] == pid
    assert (now := house.store.get(job.id)).attempt == 2 and now.num_lost == 0
    assert not (house.jobs_dir / job.id / OUTCOME).exists(), "it was that of the first attempt"


def test_a_new_runner_watches_the_attempt_of_a_killed_one(house: House) -> None:
    first = house.run_process("json")
    job = house.store.submit(program("wait_for", "go", "0"))
    (pid,) = pids_in(house.log(job))
    servers = [
        child
        for child in children_of(first.pid)
        if b"forkserver" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]
    first.kill()
    first.wait()
    runner, _, _ = house.run()
    until(lambda: runner._running)
    until(lambda: all(map(is_gone, servers)))
    time.sleep(2 * SETTINGS.lease_seconds)
    assert not is_gone(pid)
    (house.jobs_dir / job.id / "go").touch()
    ended = house.ended(job)
    assert (ended.state, ended.attempt) == ("COMPLETED", 1)
    assert pids_in(house.log(job)) == [pid], "it was started once"


def agent_of(house: House, job: Job) -> int:
    process = process_here(until(lambda: house.store.get(job.id).handle))
    assert process is not None
    return process.pid


def test_a_killed_agent_is_noticed_before_its_lease_runs_out(house: House) -> None:
    house.run(SETTINGS.model_copy(update={"lease_seconds": 600.0}))
    job = house.store.submit(program("have_children", max_attempts=1))
    pids = pids_in(house.log(job), 3)
    os.kill(agent_of(house, job), signal.SIGKILL)
    outcome = house.ended(job).outcome
    assert outcome is not None and "vanished" in str(outcome.reason)
    until(lambda: is_gone(pids[0]) and is_gone(pids[2]))
    os.kill(pids[1], signal.SIGKILL)  # it has left the session


def test_a_frozen_agent_is_killed_and_the_job_goes_on(house: House) -> None:
    house.run()
    job = house.store.submit(program("wait_for", "go", "0"))
    (pid,) = pids_in(house.log(job))
    os.kill(agent_of(house, job), signal.SIGSTOP)
    assert pids_in(house.log(job), 2)[0] == pid
    assert is_gone(pid), "two attempts never run at the same time"
    (house.jobs_dir / job.id / "go").touch()
    ended = house.ended(job)
    assert (ended.state, ended.attempt, ended.num_lost) == ("COMPLETED", 2, 1)
