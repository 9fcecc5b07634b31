"""While pushes are trained on an engine, processes are killed at random: of the stack here, of the
agent and of the training there. Every push is answered once, and nothing is left running.

`ENGINE_KILLS` is how many, `ENGINE_KILLS_SEED` which: the seed of a failure is in its message.
"""

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import httpx
import pytest

from jobs.store import JobStore
from tests.engines import RESOURCES, podman, ray, run_jobs_on, slurm
from tests.jobs_fixtures import until
from tests.stack_fixtures import Workplace, clone, configure, facts, stack_up, workplace_in

__all__ = ["podman", "ray", "slurm"]

pytestmark = pytest.mark.slow

NUM_KILLS = int(os.environ.get("ENGINE_KILLS", "1"))
SEED = int(os.environ.get("ENGINE_KILLS_SEED", "1"))


def kill_one(choice: random.Random, workplace: Workplace) -> str:
    services = {each["name"]: [each["pid"]] for each in workplace.json("status")["services"]}
    victims = {"hub": services["hub"], "runner": services["runner"]}
    if there := processes_there(workplace):
        victims["agent"] = there
    who = choice.choice(list(victims))
    os.kill(choice.choice(victims[who]), signal.SIGKILL)
    return who


def hub_answers(workplace: Workplace) -> bool:
    try:
        return httpx.get(f"{workplace.url('hub')}/health").is_success
    except httpx.TransportError:
        return False


def processes_there(workplace: Workplace) -> list[int]:
    """The agents of this stack and their trainings, which have the same command line."""
    found = map(int, subprocess.getoutput("pgrep -f 'm jobs[.]agent$'").split())
    return [pid for pid in found if f"JOB_URL={workplace.url('hub')}/" in environment_of(pid)]


def environment_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/environ").read_text()
    except OSError:  # it has ended
        return ""


@pytest.mark.timeout(120 + 90 * NUM_KILLS)
@pytest.mark.parametrize("engine", list(RESOURCES))
def test_every_push_is_answered_once(
    engine: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue(engine)
    workplace = workplace_in(tmp_path)
    configure(workplace)
    run_jobs_on(engine, workplace)
    times = "lease_seconds = 3\nheartbeat_seconds = 0.5\nretry_seconds = 1\n"
    with (workplace.folder / "pipeline.toml").open("a") as settings:
        settings.write(f"[jobs]\n{times}")
    choice = random.Random(f"{SEED} {engine}")
    killed: list[str] = []
    with stack_up(workplace), JobStore.open(workplace.home / "jobs" / "jobs.sqlite") as store:
        checkout = clone(workplace)
        for number in range(NUM_KILLS):
            # After many kills, `up` waits longer before it starts a service again.
            until(lambda: hub_answers(workplace), 60, every_seconds=0.1)
            sha = checkout.push({"facts.jsonl": facts(0, 8 + number)})
            time.sleep(choice.uniform(0, 10))
            killed.append(kill_one(choice, workplace))
            told = f"seed {SEED}, killed {killed}"
            job = workplace.wait_for_job(sha)
            assert job["outcome"]["result"] == "promoted", f"{told}: {job}\n{workplace.logs()}"
            until(lambda: not processes_there(workplace))
            served = workplace.json("status")["pipelines"][0]["served"]
            assert served["release"] == job["outcome"]["release"], told
        print(told)
        jobs = store.list()
        assert len(jobs) == NUM_KILLS and all(job.has_ended for job in jobs), told
