"""Random processes are killed at random moments; every delivery reaches an outcome, once.

`JOBS_KILLS` is how many, `JOBS_KILLS_SEED` which: the seed of a failure is in its message.
"""

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from jobs.folder import OUTCOME, PROCESS, read_json
from jobs.launchers.process import IS_LINUX
from jobs.spec import JobSpec
from jobs.store import Delivery, JobStore
from tests.jobs_fixtures import answer_to, is_gone, revisions, until

NUM_KILLS = int(os.environ.get("JOBS_KILLS", "8"))
SEED = int(os.environ.get("JOBS_KILLS_SEED", "1"))
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}


def start_runner(url: str, jobs_dir: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.jobs_runner_process", url, str(jobs_dir), "json"]
    return subprocess.Popen(command, env=ENVIRONMENT)


def children_of(pid: int) -> list[int]:
    try:
        return [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def kill_one(choice: random.Random, runner: int, jobs_dir: Path) -> str:
    """One of the runner, its warm parent, a job's leader, a job's command, or all of them."""
    records = [read_json(path) for path in sorted(jobs_dir.glob(f"*/{PROCESS}"))[-2:]]
    leaders = [int(record["pid"]) for record in records if record is not None]
    leaders = [pid for pid in leaders if b"jobs.launchers" in command_line(pid)]
    victims = {
        "runner": [runner],
        "warm parent": children_of(runner),
        "leader": leaders,
        "command": [child for pid in leaders for child in children_of(pid)],
    }
    victims["all"] = [pid for pids in victims.values() for pid in pids]
    who = choice.choice(sorted(victims))
    for pid in victims[who]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return who


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def test_every_delivery_reaches_an_outcome(tmp_path: Path) -> None:
    assert IS_LINUX, "the victims are found in /proc"
    choice = random.Random(SEED)
    url, jobs_dir = f"sqlite:///{tmp_path / 'jobs.db'}", tmp_path / "jobs"
    command = (sys.executable, "-m", "tests.jobs_program", "work_a_moment")
    killed: list[str] = []
    with JobStore.open(url) as store:
        runner = start_runner(url, jobs_dir)
        for n in range(NUM_KILLS):
            delivery = Delivery(source="hub", id=f"d{n}", body="{}")
            pipeline = f"p{n % 2}"
            spec = JobSpec(
                command=command,
                pipeline=pipeline,
                revisions=revisions(str(n + 1), str(n)),
                max_attempts=100,
            )
            store.submit(spec, delivery=delivery)
            time.sleep(choice.uniform(0.0, 0.6))
            killed.append(kill_one(choice, runner.pid, jobs_dir))
            if killed[-1] in ("runner", "all"):
                runner.wait()
                runner = start_runner(url, jobs_dir)
        told = f"seed {SEED}, killed {killed}"
        until(lambda: all(job.has_ended for job in store.list()), 60)
        for n in range(NUM_KILLS):
            answer = answer_to(store, "hub", f"d{n}")
            assert answer is not None, told
            job = store.get(answer["job"])
            while job.state == "ERROR":  # it was lost, and a successor took over its commits
                assert job.outcome is not None and job.outcome.reason is not None, told
                successor = re.search(r"(j\d+) takes over", job.outcome.reason)
                assert successor is not None, told
                job = store.get(successor[1])
            assert job.state == "COMPLETED" and job.outcome is not None, told
            assert job.spec.revisions is not None and f"d{n}" in job.spec.revisions.delivery_ids
        for job in store.list():
            has_outcome = (jobs_dir / job.id / OUTCOME).exists()
            assert has_outcome == (job.state == "COMPLETED"), told
        leaders = [read_json(path) for path in jobs_dir.glob(f"*/{PROCESS}")]
        assert all(is_gone(int(leader["pid"])) for leader in leaders if leader), told
        runner.terminate()
        assert runner.wait(timeout=30) == 0
