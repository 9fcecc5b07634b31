"""The agent of an attempt, with real processes and signals and no runner beside it."""

import fcntl
import json
import os
import signal
import sqlite3
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text

from jobs.agent import BEAT_NOW, Attempt, ForkServer
from jobs.attempt import AttemptInStore
from jobs.database import locked
from jobs.folder import COMPUTING, LOG, OUTCOME
from jobs.job import Job
from jobs.process import process_here
from jobs.store import JobStore
from tests.job_runner_fixtures import ENVIRONMENT, SETTINGS, program
from tests.jobs_fixtures import is_gone, pids_in, spec, until


class Bench:
    """A store, a fork server, and one job at a time."""

    def __init__(self, folder: Path) -> None:
        self.jobs_dir = folder / "jobs"
        self.jobs_dir.mkdir()
        self.store = JobStore.open(folder / "jobs %20?.db")
        self.server = ForkServer(())
        self.log = self.jobs_dir / "j000001" / LOG

    def start(self, *arguments: str, env: dict[str, str] = ENVIRONMENT, **values: Any) -> Job:
        wanted = program(*arguments, **values) if arguments else spec(**values)
        self.store.submit(wanted)
        return self.attempt(env)

    def attempt(self, env: dict[str, str] = ENVIRONMENT, lease_seconds: float = 60.0) -> Job:
        job = self.store.claim(f"owner {time.monotonic()}", lease_seconds)
        assert job is not None
        self.start_agent(job, env)
        return job

    def start_agent(self, job: Job, env: dict[str, str] = ENVIRONMENT) -> None:
        calls = AttemptInStore(job=job, location=self.store.location, settings=SETTINGS)
        attempt = Attempt(job=job, calls=calls, jobs_dir=self.jobs_dir, env=env, settings=SETTINGS)
        self.server.start(attempt)

    def agent(self, job: Job) -> int:
        handle = until(lambda: self.store.get(job.id).handle)
        process = process_here(handle)
        assert process is not None
        return process.pid

    def ended(self, job: Job) -> Job:
        """The job after its attempt."""

        def ask() -> Job | None:
            now = self.store.get(job.id)
            return now if now.owner != job.owner else None

        now = until(ask)
        assert now is not None
        return now

    def close(self) -> None:
        for job in self.store.list(state="RUNNING"):
            self.store.cancel(job.id)
            if job.owner is not None:
                self.ended(job)
        self.store.close()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.close()


def test_a_command_runs_as_its_own_process_in_its_folder(bench: Bench) -> None:
    job = bench.start("show_process", "-x", "a b")
    assert bench.ended(job).state == "COMPLETED"
    assert json.loads(bench.log.read_text()) == {
        "argv": ["show_process", "-x", "a b"],
        "cwd": str(bench.log.parent),
        "name": "__main__",
        "niceness": 10,
        "niceness of the session": 10 if Path("/proc/self/autogroup").exists() else None,
        "stdin": "",
        "leads_session": False,
        "in_place": sys.platform == "linux",
    }


def test_only_the_given_variables_reach_the_command(bench: Bench) -> None:
    bench.ended(bench.start("show_environment", env={**ENVIRONMENT, "GREETING": "grüße\n"}))
    shown = json.loads(bench.log.read_text())
    assert shown["GREETING"] == "grüße\n"
    assert shown.keys() - {"LC_CTYPE"} == ENVIRONMENT.keys() | {"GREETING"}


@pytest.mark.parametrize(
    ("command", "code", "log"),
    [
        (("sh", "-c", "echo out; echo err >&2; exit 7"), 7, "out\nerr\n"),
        ((sys.executable, "-m", "tests.jobs_program", "die", "odd"), 1, "TypeError"),
        (
            (sys.executable, "-m", "tests.jobs_program", "fail_with_open_files"),
            1,
            "ValueError: 4 files are open",
        ),
        (("no-such-program",), 127, "could not be started"),
        (("/",), 126, "could not be started"),
        (("echo", "x" * 200_000), 126, "could not be started"),
        (("sh", "-c", "kill -PIPE $$; exit 3"), -signal.SIGPIPE, ""),
    ],
)
def test_how_a_command_ended_is_told(
    bench: Bench, command: tuple[str, ...], code: int, log: str
) -> None:
    ended = bench.ended(bench.start(command=command, pipeline=None))
    assert ended.outcome is not None and ended.outcome.exit_code == code
    assert log in bench.log.read_text()
    assert (ended.outcome.stage == "launch") == (log == "could not be started")
    assert ("could not be started" in bench.log.read_text()) == (ended.outcome.stage == "launch")


def test_a_fork_server_that_is_killed_takes_no_job_with_it_and_is_started_again(
    bench: Bench,
) -> None:
    first = bench.start("wait_for", "go", "0")
    pids_in(bench.log)
    server: Any = forkserver._forkserver
    pid = server._forkserver_pid
    os.kill(pid, signal.SIGSTOP)  # so that it is killed during the next start
    threading.Timer(0.3, os.kill, (pid, signal.SIGKILL)).start()
    second = bench.start("write_outcome", "promoted", "0", pipeline="other")
    assert server._forkserver_pid != pid
    assert bench.ended(second).state == "COMPLETED"
    (bench.log.parent / "go").touch()
    assert bench.ended(first).state == "COMPLETED"


def test_only_the_next_attempt_removes_the_outcome_of_the_first(bench: Bench) -> None:
    job = bench.start("fail_for_now", "1")
    assert bench.ended(job).attempt == 2
    outcome = bench.log.parent / OUTCOME
    bench.start_agent(job)
    assert outcome.exists(), "the same attempt was not started again"
    until(lambda: (bench.store.seconds_to_next() or 0) > 1)
    bench.store.cancel(job.id)


def test_a_frozen_agent_wakes_up_and_changes_nothing(bench: Bench) -> None:
    bench.store.submit(program("wait_for", "go", "0"))
    first = bench.attempt(lease_seconds=1.0)
    agent = bench.agent(first)
    (pid,) = pids_in(bench.log)
    with locked(bench.store._engine):  # it must not keep the lock
        os.kill(agent, signal.SIGSTOP)
    try:
        until(bench.store.expired)
        assert first.owner is not None
        bench.store.hand_back(first.id, first.owner)
        second = bench.store.claim("second", 60)
    finally:
        os.kill(agent, signal.SIGCONT)
    until(lambda: is_gone(agent) and is_gone(pid))
    assert bench.store.get(first.id) == second
    bench.store.finish(first.id, "second", None)


def test_a_stop_reaches_every_process_and_the_job_gets_another_attempt(bench: Bench) -> None:
    job = bench.start("have_children")
    pids = pids_in(bench.log, 3)
    os.kill(bench.agent(job), signal.SIGTERM)
    now = bench.ended(job)
    assert (now.state, now.attempt, now.num_lost) == ("RUNNING", 2, 0)
    assert all(is_gone(pid) for pid in pids)


def test_a_stop_may_reach_the_command_before_its_agent(bench: Bench) -> None:
    """As from Slurm, which signals all processes of a job that it starts again."""
    job = bench.start("wait_for", "never", "0", pipeline=None)
    (pid,) = pids_in(bench.log)
    agent = bench.agent(job)
    os.kill(pid, signal.SIGTERM)
    until(lambda: is_gone(pid))
    os.kill(agent, signal.SIGTERM)
    now = bench.ended(job)
    assert (now.state, now.attempt, now.num_lost) == ("RUNNING", 2, 0)


@pytest.mark.parametrize("action", ["sleep_until_stopped", "ignore_stop"])
def test_a_cancelled_command_is_stopped(bench: Bench, action: str) -> None:
    job = bench.start(action)
    (pid,) = pids_in(bench.log)
    bench.store.cancel(job.id)
    os.kill(bench.agent(job), BEAT_NOW)
    ended = bench.ended(job)
    assert ended.state == "CANCELED" and ended.outcome is not None
    signal_of_end = signal.SIGKILL if action == "ignore_stop" else signal.SIGTERM
    assert ended.outcome.exit_code == -signal_of_end
    assert is_gone(pid)


def test_a_process_of_a_module_is_its_own_and_ends_with_it(bench: Bench) -> None:
    job = bench.start("use_multiprocessing")
    (pid,) = pids_in(bench.log)
    until(lambda: "parent True" in bench.log.read_text())
    os.kill(bench.agent(job), signal.SIGTERM)
    bench.ended(job)
    assert is_gone(pid)


def test_a_server_can_tell_that_a_job_computes_until_nobody_does(bench: Bench) -> None:
    def is_held() -> bool:
        with (bench.jobs_dir / COMPUTING).open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    job = bench.start("sleep_until_stopped")
    (pid,) = pids_in(bench.log)
    assert is_held()
    os.kill(bench.agent(job), signal.SIGKILL)
    until(lambda: is_gone(pid) and not is_held())
    assert job.owner is not None
    bench.store.hand_back(job.id, job.owner)


def test_what_a_command_leaves_behind_ends_with_it(bench: Bench) -> None:
    assert bench.ended(bench.start("leave_children")).state == "COMPLETED"
    (pid,) = pids_in(bench.log)
    assert is_gone(pid)


def test_an_end_is_recorded_when_the_store_is_back(bench: Bench) -> None:
    job = bench.start("wait_for", "go", "3")
    (pid,) = pids_in(bench.log)
    engine = create_engine("sqlite://", creator=lambda: sqlite3.connect(bench.store.location))
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE jobs RENAME TO elsewhere"))
    (bench.log.parent / "go").touch()
    until(lambda: is_gone(pid))
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE elsewhere RENAME TO jobs"))
    engine.dispose()
    outcome = bench.ended(job).outcome
    assert outcome is not None and outcome.exit_code == 3
