"""A runner that ends or is killed, with `SIGKILL`, and the next one that takes its jobs over."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from jobs.attempt_tokens import attempt_token, job_of_token
from jobs.folder import EXIT, OUTCOME
from jobs.launcher import Launch
from jobs.launchers.local import LocalLauncher
from jobs.runner import Runner
from jobs.store import JobStore
from tests.job_runner_fixtures import ENVIRONMENT, SETTINGS, House, house, program
from tests.jobs_fixtures import is_gone, lost, new_database, pids_in, postgres_server, until

__all__ = ["house", "postgres_server"]


@pytest.mark.parametrize("action", [("sleep_until_stopped",), ("stop_politely", "cancelled")])
def test_a_stopped_runner_leaves_its_jobs_to_the_next(
    house: House, action: tuple[str, ...]
) -> None:
    _, stop, thread = house.run()
    job = house.store.submit(program(*action, max_attempts=1)).job
    (pid,) = pids_in(house.log(job))
    stop.set()
    thread.join()
    assert is_gone(pid)
    assert house.store.get(job.id).state == "RUNNING"
    house.run()
    assert pids_in(house.log(job), 2)[0] == pid
    assert (now := house.store.get(job.id)).attempt == 2 and now.num_lost == 0
    assert not (house.jobs_dir / job.id / OUTCOME).exists(), "it was that of the first attempt"


def test_a_runner_whose_lease_was_taken_leaves_the_job_alone(house: House) -> None:
    runner, stop, thread = house.run()
    job = house.store.submit(program("wait_for", "go", "0")).job
    (pid,) = pids_in(house.log(job))
    # The clock of a store that believes it is later: the lease has ended for it.
    with JobStore.open(house.url, clock=lambda: time.time() + 3600) as other:
        (taken,) = until(lambda: other.adopt("other", 3600))
        assert taken.owner == "other"
        until(lambda: job.id not in runner._leased)
        stop.set()
        thread.join()
        assert not is_gone(pid), "the process is the other runner's now"
        (house.jobs_dir / job.id / "go").touch()
        until(lambda: (house.jobs_dir / job.id / EXIT).exists())
        other.finish(job.id, "other", None)


def test_a_new_runner_goes_on_with_the_process_of_a_killed_one(house: House) -> None:
    first = house.run_process("json")
    job = house.store.submit(program("wait_for", "go", "0")).job
    (pid,) = pids_in(house.log(job))
    owner = house.store.get(job.id).owner
    first.kill()
    first.wait()
    house.run_process()
    until(lambda: house.store.get(job.id).owner != owner)
    assert not is_gone(pid)
    (house.jobs_dir / job.id / "go").touch()
    ended = house.ended(job)
    assert (ended.state, ended.attempt) == ("COMPLETED", 1)
    assert pids_in(house.log(job)) == [pid], "it was started once"


def test_a_job_that_ended_while_no_runner_was_there(house: House) -> None:
    first = house.run_process()
    jobs = [
        house.store.submit(program("wait_for", "go", code, pipeline=f"p{code}")).job
        for code in ("0", "4")
    ]
    for job in jobs:
        pids_in(house.log(job))
    first.kill()
    first.wait()
    for job in jobs:
        (house.jobs_dir / job.id / "go").touch()
        until(lambda job=job: (house.jobs_dir / job.id / EXIT).exists())
    house.run_process()
    assert [house.ended(job).state for job in jobs] == ["COMPLETED", "ERROR"]
    outcome = house.store.get(jobs[1].id).outcome
    assert outcome is not None and outcome.exit_code == 4


def test_everything_killed_at_once_is_started_again(house: House) -> None:
    first = house.run_process("json")
    job = house.store.submit(program("wait_for", "go", "0")).job
    (pid,) = pids_in(house.log(job))
    leader = json.loads((house.jobs_dir / job.id / ".process.json").read_text())["pid"]
    for victim in (leader, pid, first.pid):
        try:
            os.kill(victim, signal.SIGKILL)
        except ProcessLookupError:
            assert victim == pid  # the kernel was quicker
    first.wait()
    (house.jobs_dir / job.id / "go").touch()
    house.run_process()
    ended = house.ended(job)
    assert (ended.state, ended.attempt, ended.num_lost) == ("COMPLETED", 2, 1)


def test_two_runners_share_the_jobs(house: House) -> None:
    for _ in range(2):
        house.run(SETTINGS.model_copy(update={"max_running": 2}))
    jobs = [
        house.store.submit(program("write_outcome", "promoted", "0", pipeline=f"p{n}")).job
        for n in range(8)
    ]
    assert {house.ended(job).attempt for job in jobs} == {1}


def test_jobs_run_from_postgres_too(tmp_path: Path, postgres_server: str) -> None:
    with new_database(postgres_server) as url:
        house = House(tmp_path, url)
        house.run_process("json")
        job = house.ended(house.store.submit(program("die_once")).job)
        assert (job.state, job.attempt) == ("COMPLETED", 2)
        house.close()


class Slow(LocalLauncher):
    """Its runner sleeps before or after it starts the first attempt, and then goes on."""

    def __init__(self, house: House, *, starts_first: bool) -> None:
        super().__init__(house.jobs_dir, environment=ENVIRONMENT)
        self.starts_first = starts_first
        self.sleeps, self.wakes = threading.Event(), threading.Event()

    def start(self, launch: Launch) -> str:
        handle = super().start(launch) if self.starts_first else ""
        self.sleeps.set()
        assert self.wakes.wait(60)
        return handle or super().start(launch)


@pytest.mark.parametrize("starts_first", [True, False], ids=["after the start", "before the start"])
def test_an_attempt_whose_runner_slept_is_started_once_more_and_only_the_new_one_counts(
    house: House, starts_first: bool
) -> None:
    key = b"k"
    house.jobs_dir.mkdir()
    launcher = Slow(house, starts_first=starts_first)
    job = house.store.submit(program("wait_for", "go", "0")).job
    stop = threading.Event()

    def sleepy() -> None:
        with JobStore.open(house.url) as store:
            Runner(store, house.jobs_dir, SETTINGS, ENVIRONMENT, launcher=launcher).run(stop)

    thread = threading.Thread(target=sleepy)
    thread.start()
    try:
        assert launcher.sleeps.wait(60)
        token = attempt_token(house.store.get(job.id), key)
        first = pids_in(house.log(job)) if starts_first else []
        house.run()
        pids = pids_in(house.log(job), len(first) + 1)
        assert job_of_token(token, house.store, key) is None, "the first attempt is fenced off"
        launcher.wakes.set()
        until(lambda: all(is_gone(pid) for pid in first))
        (house.jobs_dir / job.id / "go").touch()
        ended = house.ended(job)
    finally:
        launcher.wakes.set()
        stop.set()
        thread.join()
    assert (ended.state, ended.attempt, ended.num_lost) == ("COMPLETED", 2, 0)
    assert pids_in(house.log(job)) == pids


def test_a_runner_ends_its_process_once_another_attempt_runs_elsewhere(house: House) -> None:
    runner, _, _ = house.run()
    job = house.store.submit(program("wait_for", "go", "0")).job
    (pid,) = pids_in(house.log(job))
    until(lambda: house.store.get(job.id).handle)
    # The runner of another machine: it does not see the process, so it plans another attempt.
    with JobStore.open(house.url, clock=lambda: time.time() + 3600) as other:
        until(lambda: other.adopt("other", 3600))
        until(lambda: job.id not in runner._leased)
        assert not is_gone(pid)
        assert other.retry(job.id, "other", lost(job)).attempt == 2
        until(lambda: is_gone(pid) and not runner._left)
        other.finish(job.id, "other", None)
