"""A runner that ends or is killed, with `SIGKILL`, and the next one that takes its jobs over."""

import contextlib
import os
import signal
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from jobs.agent import Attempt, ForkServer
from jobs.errors import LaunchError
from jobs.folder import OUTCOME
from jobs.job import Job, attempt_token, job_of_token
from jobs.process import identify, name_of, process_here
from jobs.runner import Runner
from jobs.store import JobStore
from tests.integration.test_job_kills import children_of
from tests.job_runner_fixtures import ENVIRONMENT, SETTINGS, House, house, program
from tests.jobs_fixtures import is_gone, new_database, pids_in, postgres_server, until

__all__ = ["house", "postgres_server"]


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


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_new_runner_watches_the_attempt_of_a_killed_one(house: House, is_stopped: bool) -> None:
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
    runner, stop, thread = house.run()
    until(lambda: runner._running)
    until(lambda: all(map(is_gone, servers)))
    time.sleep(2 * SETTINGS.lease_seconds)
    assert not is_gone(pid)
    if is_stopped:
        stop.set()
        thread.join()
        assert is_gone(pid)
        assert (now := house.store.get(job.id)).attempt == 2 and now.num_lost == 0
        return
    (house.jobs_dir / job.id / "go").touch()
    ended = house.ended(job)
    assert (ended.state, ended.attempt) == ("COMPLETED", 1)
    assert pids_in(house.log(job)) == [pid], "it was started once"


def test_a_job_that_ended_while_no_runner_was_there(house: House) -> None:
    first = house.run_process()
    jobs = [
        house.store.submit(program("wait_for", "go", code, pipeline=f"p{code}"))
        for code in ("0", "4")
    ]
    for job in jobs:
        pids_in(house.log(job))
    first.kill()
    first.wait()
    for job in jobs:
        (house.jobs_dir / job.id / "go").touch()
    assert [house.ended(job).state for job in jobs] == ["COMPLETED", "ERROR"]
    outcome = house.store.get(jobs[1].id).outcome
    assert outcome is not None and outcome.exit_code == 4


def test_everything_killed_at_once_is_started_again(house: House) -> None:
    first = house.run_process("json")
    job = house.store.submit(program("have_children"))
    pids = pids_in(house.log(job), 3)
    for victim in (agent_of(house, job), pids[2], first.pid):
        with contextlib.suppress(ProcessLookupError):  # the kernel was quicker
            os.kill(victim, signal.SIGKILL)
    first.wait()
    house.run_process()
    again = pids_in(house.log(job), 6)
    now = house.store.get(job.id)
    assert (now.state, now.attempt, now.num_lost) == ("RUNNING", 2, 1)
    assert is_gone(pids[0]) and is_gone(pids[2]), "the new runner has ended the session"
    os.kill(pids[1], signal.SIGKILL)  # it has left the session
    assert not any(map(is_gone, again[3:]))


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
    job = house.store.submit(program("die_once"))
    assert house.ended(job).attempt == 2
    job = house.store.submit(program("wait_for", "go", "0"))
    (pid,) = pids_in(house.log(job))
    os.kill(agent_of(house, job), signal.SIGSTOP)
    assert pids_in(house.log(job), 2)[0] == pid
    assert is_gone(pid), "two attempts never run at the same time"
    (house.jobs_dir / job.id / "go").touch()
    ended = house.ended(job)
    assert (ended.state, ended.attempt, ended.num_lost) == ("COMPLETED", 2, 1)


@pytest.mark.parametrize("begins", [True, False])
def test_an_attempt_that_begins_or_ends_while_its_runner_stops(house: House, begins: bool) -> None:
    runner = Runner(house.store, house.jobs_dir, SETTINGS, ENVIRONMENT, start_agent=lambda _: None)
    job = house.store.submit(program("die"))
    runner._step(is_stopping=False)
    ((owner, as_it_was),) = runner._running.items()
    agent = subprocess.Popen(["sleep", "600"], start_new_session=True)
    process = identify(agent.pid)
    assert process is not None
    if begins:
        house.store.started(job.id, owner, name_of(process))
    else:
        house.store.finish(job.id, owner, None)
    runner._tell(as_it_was, is_stopping=True)
    assert runner._running, "it looks again before it ends"
    runner._step(is_stopping=True)
    assert bool(runner._running) == begins
    if not begins:
        agent.terminate()
    assert agent.wait(30) == -signal.SIGTERM


def test_an_attempt_that_has_ended_though_its_start_failed_stays_as_it_is(house: House) -> None:
    def end_and_fail(attempt: Attempt) -> None:
        house.store.finish(attempt.job_id, attempt.owner, None)
        raise LaunchError("The answer was lost.")

    job = house.store.submit(program("die"))
    runner = Runner(house.store, house.jobs_dir, SETTINGS, ENVIRONMENT, start_agent=end_and_fail)
    runner.run(threading.Event(), until_idle=True)
    assert house.store.get(job.id).state == "COMPLETED"


def test_two_runners_share_the_jobs(house: House) -> None:
    for _ in range(2):
        house.run(SETTINGS.model_copy(update={"max_running": 2}))
    jobs = [
        house.store.submit(program("write_outcome", "promoted", "0", pipeline=f"p{n}"))
        for n in range(8)
    ]
    assert {house.ended(job).attempt for job in jobs} == {1}


def test_jobs_run_from_postgres_too(tmp_path: Path, postgres_server: str) -> None:
    with new_database(postgres_server) as url:
        house = House(tmp_path, url)
        house.run_process("json")
        job = house.ended(house.store.submit(program("die_once")))
        assert (job.state, job.attempt) == ("COMPLETED", 2)
        house.close()


@pytest.mark.parametrize("starts_first", [True, False], ids=["after the start", "before the start"])
def test_a_runner_that_slept_at_a_start_starts_nothing_twice(
    house: House, starts_first: bool
) -> None:
    """Its attempt counts if the agent was started, and can begin no more if it was not."""
    house.jobs_dir.mkdir()
    server = ForkServer(())
    sleeps, wakes, stop = threading.Event(), threading.Event(), threading.Event()

    def start_slowly(attempt: Attempt) -> None:
        if starts_first:
            server.start(attempt)
        sleeps.set()
        assert wakes.wait(60)
        if not starts_first:
            server.start(attempt)

    def sleepy() -> None:
        with JobStore.open(house.url) as store:
            Runner(store, house.jobs_dir, SETTINGS, ENVIRONMENT, start_agent=start_slowly).run(stop)

    job = house.store.submit(program("wait_for", "go", "0"))
    token = attempt_token(replace(job, attempt=1), b"k")
    thread = threading.Thread(target=sleepy)
    thread.start()
    try:
        assert sleeps.wait(60)
        house.run()
        (pid,) = pids_in(house.log(job))
        is_valid = job_of_token(token, house.store, b"k") is not None
        assert is_valid == starts_first, "the attempt that did not begin is fenced off"
        wakes.set()
        time.sleep(0.5)
        (house.jobs_dir / job.id / "go").touch()
        ended = house.ended(job)
    finally:
        wakes.set()
        stop.set()
        thread.join()
    assert (ended.state, ended.attempt, ended.num_lost) == (
        "COMPLETED",
        1 if starts_first else 2,
        0,
    )
    assert pids_in(house.log(job)) == [pid]
