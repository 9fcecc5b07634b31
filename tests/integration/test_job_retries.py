"""Failures that can pass are tried again after a wait, and those that cannot are not."""

import errno
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from jobs.errors import LaunchError, StoreError
from jobs.job import Job
from jobs.launcher import Launch, Launcher
from jobs.launchers.local import LocalLauncher
from jobs.runner import Runner
from jobs.settings import JobsSettings
from jobs.spec import JobSpec, Resources
from jobs.store import JobStore
from jobs.temporary_failures import is_temporary
from tests.job_runner_fixtures import ENVIRONMENT, SETTINGS, House, house, program
from tests.jobs_fixtures import delivery, pids_in, revisions, until

__all__ = ["house"]

SOON = SETTINGS.model_copy(update={"retry_seconds": 0.05})
LATER = SETTINGS.model_copy(update={"retry_seconds": 600.0, "max_running": 1})


def is_waiting(house: House, job: Job) -> bool:
    now = house.store.get(job.id)
    return now.state == "RUNNING" and now.attempt == 2 and now.handle is None


def test_a_failure_that_passes_is_forgotten(house: House) -> None:
    house.run(SOON)
    job = house.ended(house.store.submit(program("fail_for_now", "2")).job)
    assert (job.state, job.attempt, job.num_lost) == ("COMPLETED", 3, 2)
    assert job.outcome is not None and job.outcome.result == "promoted"


FAIL_ONCE_AND_SAY_NOTHING = """
[ -e second ] && exit 0
touch second
echo '{"result": "failed", "may_pass": true}' > outcome.json
exit 1
"""


@pytest.mark.parametrize("fails_again", [False, True])
@pytest.mark.parametrize(
    "spec",
    [
        program("die_once"),
        JobSpec(command=("sh", "-c", FAIL_ONCE_AND_SAY_NOTHING), pipeline="faq"),
    ],
    ids=["killed", "failed"],
)
def test_a_retry_that_was_stored_but_not_answered_counts_once(
    house: House, monkeypatch: pytest.MonkeyPatch, spec: JobSpec, fails_again: bool
) -> None:
    retry = JobStore.retry

    def fail(*_: object, **__: object) -> None:
        monkeypatch.undo()
        raise StoreError("The connection was lost.")

    def lose_the_answer(*arguments: Any) -> None:
        monkeypatch.undo()
        retry(*arguments)
        if fails_again:
            monkeypatch.setattr(JobStore, "adopt", fail)
        raise StoreError("The connection was lost.")

    monkeypatch.setattr(JobStore, "retry", lose_the_answer)
    job = house.store.submit(spec).job
    house.run(SOON)
    ended = house.ended(job)
    assert (ended.state, ended.attempt, ended.num_lost) == ("COMPLETED", 2, 1)


def test_a_failure_that_does_not_pass_ends_the_job_after_its_last_attempt(house: House) -> None:
    house.run(SOON)
    job = house.ended(house.store.submit(program("fail_for_now", "9", max_attempts=2)).job)
    assert (job.state, job.attempt) == ("ERROR", 2) and job.outcome is not None
    assert job.outcome.reason == "The hub is away. That was failed attempt 2 of 2."
    assert job.outcome.stage == "snapshot"


def test_each_wait_is_four_times_the_one_before(house: House) -> None:
    with JobStore.open(house.url, clock=lambda: 1000.0) as store:
        jobs = [
            store.submit(
                JobSpec(command=("sh", "-c", "exit 75"), pipeline=pipeline, max_attempts=attempts)
            ).job
            for pipeline, attempts in (("faq", 2), ("other", 3))
        ]
        Runner(store, house.jobs_dir, SOON, ENVIRONMENT).run_until_idle(threading.Event())
        waits = [store.get(job.id).run_after - 1000.0 for job in jobs]
    assert waits == pytest.approx([SOON.retry_seconds, 4 * SOON.retry_seconds])


@pytest.mark.parametrize(
    ("code", "attempts"), [(75, 2), (1, 1)], ids=["temporary failure", "any other"]
)
def test_the_exit_code_of_a_trainer_says_whether_its_failure_may_pass(
    house: House, code: int, attempts: int
) -> None:
    house.run(SOON)
    command = ("sh", "-c", f"echo no room; exit {code}")
    spec = JobSpec(command=command, pipeline="faq", max_attempts=2)
    job = house.ended(house.store.submit(spec).job)
    assert (job.state, job.attempt) == ("ERROR", attempts) and job.outcome is not None
    assert "no room" in str(job.outcome.reason) and job.outcome.exit_code == code


def test_a_job_that_waits_gives_way_to_a_newer_push_and_holds_up_no_other(house: House) -> None:
    house.run(LATER)
    spec = program("fail_for_now", "9", revisions=revisions("b", "a"))
    first = house.store.submit(spec, delivery=delivery("d1")).job
    until(lambda: is_waiting(house, first))
    # The only place of this runner is free meanwhile.
    house.ended(house.store.submit(JobSpec(command=("true",))).job)
    assert is_waiting(house, first)
    spec = program("write_outcome", "promoted", "0", revisions=revisions("c", "b"))
    second = house.ended(house.store.submit(spec, delivery=delivery("d2")).job)
    assert second.state == "COMPLETED"
    outcome = house.store.get(first.id).outcome
    assert outcome is not None and outcome.reason is not None
    assert outcome.reason == f"The hub is away. {second.id} trains on the newest commit."


def test_a_job_that_waits_can_be_cancelled(house: House) -> None:
    house.run(LATER)
    job = house.store.submit(program("fail_for_now", "9")).job
    until(lambda: is_waiting(house, job))
    house.store.cancel(job.id)
    ended = house.ended(job)
    assert ended.state == "CANCELED" and ended.outcome is not None
    assert "while it waited for another attempt. The hub is away." in str(ended.outcome.reason)


def test_the_next_runner_keeps_the_wait(house: House) -> None:
    _, stop, thread = house.run(LATER)
    job = house.store.submit(program("fail_for_now", "9")).job
    until(lambda: is_waiting(house, job))
    started_at = house.store.get(job.id).started_at
    stop.set()
    thread.join()
    moved = house.store.get(job.id).started_at
    assert started_at is not None and moved is not None
    assert moved > started_at, "the wait until now must not count as run time"
    runner, _, _ = house.run(LATER)
    until(lambda: job.id in runner._leased)
    house.ended(house.store.submit(JobSpec(command=("true",))).job)
    assert house.log(job).read_text() == "attempt\n"


class FailingAtFirst(LocalLauncher):
    """No process can be started at first."""

    def __init__(self, jobs_dir: Path, error: OSError) -> None:
        super().__init__(jobs_dir, environment=ENVIRONMENT)
        self.error: OSError | None = error

    def start(self, launch: Launch) -> str:
        if self.error is not None:
            error, self.error = self.error, None
            raise LaunchError(f"No process could be started: {error}") from error
        return super().start(launch)


@pytest.mark.parametrize(("code", "state"), [(errno.EAGAIN, "COMPLETED"), (errno.EACCES, "ERROR")])
def test_a_failed_fork_is_tried_again(house: House, code: int, state: str) -> None:
    house.jobs_dir.mkdir()
    launcher: Launcher = FailingAtFirst(house.jobs_dir, OSError(code, "no"))
    stop = threading.Event()
    job = house.store.submit(program("write_outcome", "promoted", "0")).job
    with JobStore.open(house.url) as store:
        runner = Runner(store, house.jobs_dir, SOON, ENVIRONMENT, launcher=launcher)
        runner.run_until_idle(stop)
    assert house.store.get(job.id).state == state


@pytest.mark.slow
def test_the_time_limit_leaves_out_the_time_in_which_no_runner_was_there(house: House) -> None:
    settings = JobsSettings(**SETTINGS.model_dump() | {"lease_seconds": 0.4})
    job = house.store.submit(
        program("stop_politely", "cancelled", resources=Resources(timeout_seconds=600))
    ).job
    offset = 0.0

    def run() -> tuple[threading.Event, threading.Thread]:
        store = JobStore.open(house.url, clock=lambda: time.time() + offset)
        stop = threading.Event()

        def work() -> None:
            with store:
                Runner(store, house.jobs_dir, settings, ENVIRONMENT).run(stop)

        thread = threading.Thread(target=work)
        thread.start()
        return stop, thread

    stop, thread = run()
    pids_in(house.log(job))
    stop.set()
    thread.join()
    offset = 3600.0
    stop, thread = run()
    try:
        pids_in(house.log(job), 2)
        house.store.cancel(job.id)
        assert house.ended(job).state == "CANCELED"
    finally:
        stop.set()
        thread.join()


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
