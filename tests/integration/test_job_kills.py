"""Random processes are killed at random moments; every delivery reaches an outcome, once.

`JOBS_KILLS` is how many, `JOBS_KILLS_SEED` which: the seed of a failure is in its message.
"""

import contextlib
import os
import random
import re
import signal
import time
from pathlib import Path

from jobs.folder import OUTCOME
from jobs.process import IS_LINUX, is_alive, process_here
from jobs.store import JobStore
from tests.job_runner_fixtures import House, house, program
from tests.jobs_fixtures import answer_to, delivery, is_gone, revisions, until

__all__ = ["house"]

NUM_KILLS = int(os.environ.get("JOBS_KILLS", "8"))
SEED = int(os.environ.get("JOBS_KILLS_SEED", "1"))


def children_of(pid: int) -> list[int]:
    try:
        return [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def kill_one(choice: random.Random, runner: int, store: JobStore) -> str:
    """One of the runner, its fork server, a job's agent, a job's command, or all of them."""
    agents = [
        agent.pid
        for job in store.list(state="RUNNING")
        if job.handle and (agent := process_here(job.handle)) is not None and is_alive(agent)
    ]
    victims = {
        "runner": [runner],
        "fork server": children_of(runner),
        "agent": agents,
        "command": [child for pid in agents for child in children_of(pid)],
    }
    victims["all"] = [pid for pids in victims.values() for pid in pids]
    who = choice.choice(sorted(victims))
    for pid in victims[who]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return who


def processes_in(jobs_dir: Path) -> list[int]:
    """The processes whose working folder is in `jobs_dir`."""
    found = []
    for folder in Path("/proc").glob("[0-9]*/cwd"):
        with contextlib.suppress(OSError):
            if folder.readlink().is_relative_to(jobs_dir):
                found.append(int(folder.parent.name))
    return found


def test_every_delivery_reaches_an_outcome(house: House) -> None:
    assert IS_LINUX, "the victims are found in /proc"
    choice, store = random.Random(SEED), house.store
    killed: list[str] = []
    runner = house.run_process("json")
    for n in range(NUM_KILLS):
        commits = revisions(str(n + 1), str(n))
        work = {"pipeline": f"p{n % 2}", "revisions": commits, "max_attempts": 100}
        store.submit(program("work_a_moment", **work), delivery=delivery(f"d{n}"))
        time.sleep(choice.uniform(0.0, 0.6))
        killed.append(kill_one(choice, runner.pid, store))
        if killed[-1] in ("runner", "all"):
            runner.wait()
            runner = house.run_process("json")
    told = f"seed {SEED}, killed {killed}"
    until(lambda: all(job.has_ended for job in store.list()), 60)
    for n in range(NUM_KILLS):
        answer = answer_to(store, "hub", f"d{n}")
        assert answer is not None, told
        job = store.get(answer["job"])
        assert job.spec.revisions is not None and f"d{n}" in job.spec.revisions.delivery_ids
        while job.state == "ERROR":  # it was lost, and a successor took over its commits
            assert job.outcome is not None and job.outcome.reason is not None, told
            successor = re.search(r"(j\d+) trains on", job.outcome.reason)
            assert successor is not None, told
            job = store.get(successor[1])
        assert job.state == "COMPLETED" and job.outcome is not None, told
    for job in store.list():
        has_outcome = (house.jobs_dir / job.id / OUTCOME).exists()
        assert has_outcome == (job.state == "COMPLETED"), told
    assert not processes_in(house.jobs_dir), told
    children = children_of(runner.pid)
    runner.terminate()
    assert runner.wait(timeout=30) == 0
    until(lambda: all(map(is_gone, children)))
