"""The life of a job on a real engine: the whole stack here, the agent there."""

import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest

from jobs.job import Job
from jobs.store import JobStore
from tests.engines import IMAGE, KillNode, launcher, output, podman, ray, slurm
from tests.jobs_fixtures import until
from tests.stack_fixtures import Workplace, stack_up, workplace_in

__all__ = ["podman", "ray", "slurm"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SECRET = "secret-that-no-engine-shows"
SHOWN = {
    "slurm": "scontrol show job",
    "podman": "podman inspect $(podman ps --all --quiet)",
    "ray": "ray job list",
}
"""What an engine tells about its jobs."""
SECONDS = count(10_000)
"""Each job waits for another time, so that its process can be found."""


@dataclass(frozen=True)
class Waiting:
    """A job whose first attempt waits, until it is killed or its time is over."""

    job_id: str
    process: str
    """The command line of the process that waits."""

    def pids(self) -> list[int]:
        return [int(pid) for pid in subprocess.getoutput(f"pgrep -fx '{self.process}'").split()]


@dataclass(frozen=True)
class Engine:
    name: str
    workplace: Workplace
    store: JobStore
    kill_node: KillNode

    def submit(self, script: str, *options: str) -> str:
        """Let the script run there. Returns the id of its job."""
        image = ["--image", IMAGE] if self.name == "podman" else []
        words = ["jobs", "run", "--detach", "--launcher", self.name, *image, *options]
        return self.workplace.run(*words, "--", "sh", "-c", script).split()[0]

    def start(self, *options: str, seconds: int | None = None) -> Waiting:
        process = f"sleep {next(SECONDS) if seconds is None else f'{seconds}.{next(SECONDS)}'}"
        script = f'echo begun; case "$JOB_URL" in */1) exec {process};; esac; echo again'
        if seconds is not None:
            script = f"echo begun; {process}; echo ended"
        waiting = Waiting(self.submit(script, *options), process)
        until(lambda: waiting.pids() and "begun" in self.log(waiting.job_id), 90)
        return waiting

    def log(self, job_id: str) -> str:
        """What the hub has of it."""
        file = self.workplace.home / "jobs" / job_id / "log.txt"
        return file.read_text() if file.exists() else ""

    def ended(self, job_id: str) -> Job:
        def job() -> Job | None:
            found = self.store.get(job_id)
            return found if found.has_ended else None

        return until(job, 120, every_seconds=0.05)


@pytest.fixture(scope="module", params=list(SHOWN))
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    kill_node = request.getfixturevalue(request.param)
    workplace = workplace_in(tmp_path_factory.mktemp("stack"))
    (workplace.folder / "pipeline.toml").write_text(
        "[jobs]\nlease_seconds = 3\nheartbeat_seconds = 0.5\n"
        "kill_grace_seconds = 2\nretry_seconds = 1\n"
        f"{launcher(request.param)}[[pipelines]]\nname = 'facts'\ndataset = 'local/facts'\n"
    )
    with stack_up(workplace), JobStore.open(workplace.home / "jobs" / "jobs.sqlite") as store:
        yield Engine(request.param, workplace, store, kill_node)


def test_its_log_and_exit_code_come_back(engine: Engine) -> None:
    script = 'echo "$WORD" | tr s S; exit 3'
    job = engine.ended(engine.submit(script, "--secret", f"WORD={SECRET}"))
    assert job.state == "ERROR" and job.attempt == 1
    assert job.outcome is not None and job.outcome.exit_code == 3, job.outcome
    assert "Secret" in engine.log(job.id)


def test_it_is_cancelled_and_its_secret_is_shown_nowhere(engine: Engine) -> None:
    waiting = engine.start("--secret", f"WORD={SECRET}")
    shown = output("sh", "-c", SHOWN[engine.name])
    assert f"hotpush-{waiting.job_id}-1" in shown and SECRET not in shown
    engine.workplace.run("jobs", "cancel", waiting.job_id)
    job = engine.ended(waiting.job_id)
    assert job.state == "CANCELED" and job.attempt == 1
    until(lambda: not waiting.pids())


def test_it_is_stopped_at_its_time_limit(engine: Engine) -> None:
    process = f"sleep {next(SECONDS)}"
    job = engine.ended(engine.submit(f"echo begun; exec {process}", "--timeout", "20s"))
    assert job.outcome is not None and job.outcome.stage == "timeout", job.outcome
    assert "begun" in engine.log(job.id) and job.attempt == 1
    assert not Waiting(job.id, process).pids()


def test_a_killed_agent_gets_another_attempt(engine: Engine) -> None:
    waiting = engine.start()
    (pid,) = waiting.pids()
    stat = Path(f"/proc/{pid}/stat").read_text()
    os.kill(int(stat.rpartition(")")[2].split()[1]), signal.SIGKILL)
    job = engine.ended(waiting.job_id)
    assert job.state == "COMPLETED" and job.attempt == 2, job.outcome
    assert "again" in engine.log(job.id) and not waiting.pids()


def test_a_killed_runner_changes_nothing(engine: Engine) -> None:
    waiting = engine.start(seconds=8)
    services = {each["name"]: each for each in engine.workplace.json("status")["services"]}
    os.kill(services["runner"]["pid"], signal.SIGKILL)
    job = engine.ended(waiting.job_id)
    assert job.state == "COMPLETED" and job.attempt == 1, job.outcome
    assert engine.log(job.id).split() == ["begun", "ended"]


def test_a_node_whose_daemon_is_killed_runs_nothing_twice(engine: Engine) -> None:
    waiting = engine.start(seconds=9)
    engine.kill_node()
    job = engine.ended(waiting.job_id)
    assert job.state == "COMPLETED", job.outcome
    assert engine.log(job.id).count("ended") == 1 and not waiting.pids()


@pytest.mark.parametrize("engine", ["slurm"], indirect=True)
def test_a_job_that_the_engine_starts_again_gets_another_attempt(engine: Engine) -> None:
    waiting = engine.start()
    name = f"hotpush-{waiting.job_id}-1"
    shown = output("squeue", "--noheader", "--format=%i %j").splitlines()
    (number,) = [line.split()[0] for line in shown if name in line]
    output("scontrol", "requeue", number)
    job = engine.ended(waiting.job_id)
    assert job.state == "COMPLETED" and job.attempt == 2, job.outcome
    assert "again" in engine.log(job.id) and not waiting.pids()


@pytest.mark.parametrize("engine", ["podman"], indirect=True)
def test_a_job_that_needs_too_much_memory_says_so(engine: Engine) -> None:
    job = engine.ended(engine.submit("python3 -c 'print(len(\"x\" * 10**9))'; exit $?"))
    assert job.outcome is not None and "because memory ran out" in str(job.outcome.reason)
    assert job.attempt == 1
