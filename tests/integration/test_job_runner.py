"""The runner from submission to outcome, with real processes; and killed, with `SIGKILL`."""

import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text

from jobs.folder import EXIT, LOG
from jobs.logs import follow_log
from jobs.record import Job
from jobs.runner import Runner
from jobs.settings import JobsSettings
from jobs.spec import JobSpec, Resources
from jobs.store import Delivery, JobStore
from tests.jobs_fixtures import is_gone, new_database, pids_in, postgres_server, revisions, until

__all__ = ["postgres_server"]

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
SETTINGS = JobsSettings(
    max_running=4, lease_seconds=1.0, heartbeat_seconds=0.2, kill_grace_seconds=0.5
)
PAYLOAD = {
    "repo": {"type": "dataset", "name": "acme/faq"},
    "webhook": {"id": "w1", "version": 3},
}


def program(*arguments: str, pipeline: str | None = "faq", **values: Any) -> JobSpec:
    command = (sys.executable, "-m", "tests.jobs_program", *arguments)
    return JobSpec(**{"command": command, "pipeline": pipeline, **values})


class House:
    """A store, a folder for jobs, and runners in threads and processes."""

    def __init__(self, folder: Path, url: str) -> None:
        self.url = url
        self.jobs_dir = folder / "jobs"
        self.store = JobStore.open(url)
        self._stops: list[tuple[threading.Event, threading.Thread]] = []
        self._processes: list[subprocess.Popen[bytes]] = []

    def run(
        self, settings: JobsSettings = SETTINGS, **environment: str
    ) -> tuple[Runner, threading.Event, threading.Thread]:
        """A runner in a thread; returns what stops it."""
        store = JobStore.open(self.url)
        runner = Runner(store, self.jobs_dir, settings, {**ENVIRONMENT, **environment})
        stop = threading.Event()

        def work() -> None:
            with store:
                runner.run(stop)

        thread = threading.Thread(target=work)
        thread.start()
        self._stops.append((stop, thread))
        return runner, stop, thread

    def run_process(self, *preload: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.jobs_runner_process", self.url, self.jobs_dir, *preload],
            env=ENVIRONMENT,
        )
        self._processes.append(process)
        return process

    def ended(self, job: Job) -> Job:
        def ask() -> Job | None:
            now = self.store.get(job.id)
            return now if now.has_ended else None

        ended = until(ask)
        assert ended is not None
        return ended

    def log(self, job: Job) -> Path:
        return self.jobs_dir / job.id / LOG

    def close(self) -> None:
        for job in self.store.list():
            self.store.cancel(job.id)
        for stop, _ in self._stops:
            stop.set()
        for _, thread in self._stops:
            thread.join()
        for process in self._processes:
            process.terminate()
            process.wait()
        self.store.close()


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path, f"sqlite:///{tmp_path / 'jobs.db'}")
    yield house
    house.close()


def test_a_job_runs_from_submission_to_outcome(house: House) -> None:
    house.run(HF_TOKEN="t0ken")
    spec = program(
        "show_environment",
        env={"COLOUR": "blue"},
        settings={"lr": 0.1},
        resources=Resources(num_threads=3),
    )
    job = house.store.submit(spec, payload=PAYLOAD).job
    ended = house.ended(job)
    assert (ended.state, ended.outcome, ended.attempt) == ("COMPLETED", None, 1)
    folder = house.jobs_dir / job.id
    assert JobSpec.model_validate_json((folder / "spec.json").read_text()) == spec
    shown = json.loads(house.log(job).read_text())
    assert json.loads(Path(shown["WEBHOOK_PAYLOAD_FILE"]).read_text()) == PAYLOAD
    expected = {
        "WEBHOOK_PAYLOAD": json.dumps(PAYLOAD),
        "WEBHOOK_REPO_ID": "acme/faq",
        "WEBHOOK_REPO_TYPE": "dataset",
        "WEBHOOK_ID": "w1",
        "JOB_ID": job.id,
        "JOB_DIR": str(folder),
        "HF_TOKEN": "t0ken",
        "COLOUR": "blue",
        "OMP_NUM_THREADS": "3",
    }
    assert expected.items() <= shown.items()
    files = [path for path in folder.rglob("*") if path.name != LOG]
    assert not any("t0ken" in path.read_text() for path in files), "a secret is on disk"


@pytest.mark.parametrize("same_spec", [False, True])
def test_the_folder_of_a_lost_database_is_not_believed(house: House, same_spec: bool) -> None:
    spec = program("write_outcome", "published", "0")
    old = house.jobs_dir / "j000001"
    old.mkdir(parents=True)
    (old / "spec.json").write_text((spec if same_spec else program("x")).model_dump_json())
    (old / "job.json").write_text('{"id": "j000001", "created_at": 1.0}')
    (old / "process.json").write_text('{"attempt": 1, "pid": 1, "started": "1"}')
    (old / "exit.json").write_text('{"attempt": 1, "exit_code": 0, "error": null}')
    (old / "outcome.json").write_text('{"result": "promoted"}')
    job = house.store.submit(spec).job
    assert job.id == old.name
    house.run()
    outcome = house.ended(job).outcome
    assert outcome is not None and outcome.result == "published"
    aside = house.jobs_dir / "j000001.stale-1"
    assert json.loads((aside / "outcome.json").read_text()) == {"result": "promoted"}


def test_a_payload_beyond_what_a_variable_can_hold(house: House) -> None:
    house.run()
    files = [{"path": f"data/{n:06}.jsonl", "size": n} for n in range(10_000)]
    payload = {**PAYLOAD, "updatedFiles": files}
    job = house.store.submit(program("show_environment"), payload=payload).job
    assert house.ended(job).state == "COMPLETED"
    shown = json.loads(house.log(job).read_text())
    inline = json.loads(shown["WEBHOOK_PAYLOAD"])
    assert inline["updatedFilesTruncated"] is True and inline["repo"] == PAYLOAD["repo"]
    assert json.loads(Path(shown["WEBHOOK_PAYLOAD_FILE"]).read_text()) == payload


def test_the_outcome_that_a_job_wrote_is_final(house: House) -> None:
    house.run()
    job = house.ended(house.store.submit(program("write_outcome", "promoted", "9")).job)
    assert job.state == "COMPLETED" and job.outcome is not None
    assert job.outcome.release == "r000001-1f3ac9d2"


def test_an_outcome_that_is_none_is_a_failure(house: House) -> None:
    house.run()
    job = house.ended(house.store.submit(program("write_outcome", "splendid", "0")).job)
    assert job.state == "ERROR" and job.outcome is not None and job.outcome.reason is not None
    assert "outcome.json" in job.outcome.reason


@pytest.mark.parametrize(
    ("command", "stage", "code", "reason"),
    [
        (("sh", "-c", "echo no such column; exit 3"), None, 3, "no such column"),
        (("no-such-program",), "launch", 127, "No such file"),
        (("sh", "-c", "kill -9 $$"), None, -9, "signal 9"),
    ],
)
def test_a_plain_command_that_fails(
    house: House, command: tuple[str, ...], stage: str | None, code: int, reason: str
) -> None:
    house.run()
    job = house.ended(house.store.submit(JobSpec(command=command)).job)
    assert job.state == "ERROR" and job.outcome is not None and job.outcome.reason is not None
    assert (job.outcome.stage, job.outcome.exit_code) == (stage, code)
    assert reason in job.outcome.reason


def test_an_unknown_launcher_fails_the_job(house: House) -> None:
    house.run()
    job = house.ended(house.store.submit(JobSpec(command=("true",), launcher="slurm")).job)
    assert job.outcome is not None and job.outcome.stage == "launch"
    assert job.outcome.reason is not None and "'slurm'" in job.outcome.reason


def test_a_killed_job_goes_on_from_what_it_wrote(house: House) -> None:
    house.run()
    job = house.ended(house.store.submit(program("die_once")).job)
    assert (job.state, job.attempt, job.num_lost) == ("COMPLETED", 2, 1)
    assert house.log(job).read_text() == "second attempt\n"


def test_a_job_that_always_dies_fails(house: House) -> None:
    house.run()
    delivery = Delivery(source="hub", id="d1", body="{}")
    spec = program("die", max_attempts=2, revisions=revisions("b", "a"))
    job = house.ended(house.store.submit(spec, delivery=delivery).job)
    assert job.state == "ERROR" and job.outcome is not None and job.outcome.reason is not None
    assert (job.outcome.stage, job.outcome.delivery_ids) == ("lost", ("d1",))
    assert "attempt 2 of 2" in job.outcome.reason


@pytest.mark.parametrize(
    "action", [("sleep_until_stopped",), ("ignore_stop",), ("stop_politely", "failed")]
)
def test_a_cancelled_job_is_cancelled(house: House, action: tuple[str, ...]) -> None:
    house.run()
    job = house.store.submit(program(*action)).job
    (pid,) = pids_in(house.log(job))
    house.store.cancel(job.id)
    ended = house.ended(job)
    assert ended.state == "CANCELED" and ended.outcome is not None
    assert ended.outcome.result == "cancelled"
    assert is_gone(pid)


def test_a_cancel_that_came_too_late_changes_nothing(house: House) -> None:
    house.run()
    job = house.store.submit(program("stop_politely", "promoted")).job
    pids_in(house.log(job))
    house.store.cancel(job.id)
    assert house.ended(job).state == "COMPLETED"


def test_a_job_that_takes_too_long_is_stopped(house: House) -> None:
    house.run()
    limit = Resources(timeout_seconds=1.5)
    job = house.ended(house.store.submit(program("have_children", resources=limit)).job)
    assert job.state == "ERROR" and job.outcome is not None and job.outcome.reason is not None
    assert job.outcome.stage == "timeout" and "1.5 s" in job.outcome.reason
    assert all(is_gone(pid) for pid in pids_in(house.log(job), 3))


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


def test_a_runner_whose_lease_was_taken_leaves_the_job_alone(house: House) -> None:
    runner, stop, thread = house.run()
    job = house.store.submit(program("wait_for", "go", "0")).job
    (pid,) = pids_in(house.log(job))
    # The clock of a store that believes it is later: the lease has ended for it.
    with JobStore.open(house.url, clock=lambda: time.time() + 3600) as other:
        (taken,) = until(lambda: other.adopt("other", 3600))
        assert taken.owner == "other"
        until(lambda: job.id not in runner._held)
        stop.set()
        thread.join()
        assert not is_gone(pid), "the process is the other runner's now"
        (house.jobs_dir / job.id / "go").touch()
        until(lambda: (house.jobs_dir / job.id / EXIT).exists())
        other.finish(job.id, "other", None)


def test_a_runner_waits_for_a_store_that_fails_and_comes_back(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    house.run()
    assert house.ended(house.store.submit(JobSpec(command=("true",))).job).state == "COMPLETED"
    engine = create_engine(house.url)
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE jobs RENAME TO elsewhere"))
    until(lambda: "Trying again" in caplog.text)
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE elsewhere RENAME TO jobs"))
    engine.dispose()
    assert house.ended(house.store.submit(JobSpec(command=("true",))).job).state == "COMPLETED"


def test_run_until_idle_returns_when_nothing_is_left(house: House) -> None:
    for n in range(2):
        house.store.submit(JobSpec(command=("true",), debounce_seconds=0.2 * n))
    house.store.submit(program("write_outcome", "unchanged", "0"))
    Runner(house.store, house.jobs_dir, SETTINGS, ENVIRONMENT).run_until_idle(threading.Event())
    assert {job.state for job in house.store.list()} == {"COMPLETED"}


def test_a_log_is_followed_to_its_end(house: House) -> None:
    house.run()
    script = "for n in 1 2 3; do echo line $n; sleep 0.1; done; printf end"
    job = house.store.submit(JobSpec(command=("sh", "-c", script))).job
    pieces = b"".join(follow_log(house.store, house.jobs_dir, job.id, poll_seconds=0.01))
    assert pieces == b"line 1\nline 2\nline 3\nend"
    assert b"".join(follow_log(house.store, house.jobs_dir, job.id, offset=21)) == b"end"


# SIGKILL


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
    leader = json.loads((house.jobs_dir / job.id / "process.json").read_text())["pid"]
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


def test_seconds_from_submission_to_the_first_line(
    house: House, record_property: Callable[[str, object], None]
) -> None:
    """Reported, not asserted: a busy machine is no bug."""
    house.run(SETTINGS.model_copy(update={"preload": ("json",)}))
    seconds: dict[str, list[float]] = {"warm": [], "cold": []}
    for n in range(6):
        for kind, command in (
            ("warm", (sys.executable, "-m", "tests.jobs_program", "say", "here")),
            ("cold", ("sh", "-c", "echo here")),
        ):
            began = time.monotonic()
            job = house.store.submit(JobSpec(command=command)).job
            until(lambda job=job: house.log(job).exists() and house.log(job).stat().st_size)
            if n:  # the first one waits for the warm parent
                seconds[kind].append(time.monotonic() - began)
    for kind, all_seconds in seconds.items():
        record_property(f"{kind}_median_seconds", statistics.median(all_seconds))
        print(f"{kind}: {statistics.median(all_seconds):.3f} s")
