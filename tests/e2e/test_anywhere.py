"""The whole loop with its jobs on an engine, where no folder of the stack is. In the container, the
job is another user in another root."""

from pathlib import Path

import httpx
import pytest

from tests.engines import RESOURCES, podman, ray, run_jobs_on, slurm
from tests.stack_fixtures import Workplace, clone, configure, facts, stack_up, workplace_in

__all__ = ["podman", "ray", "slurm"]

pytestmark = pytest.mark.slow


@pytest.fixture(params=list(RESOURCES))
def workplace(request: pytest.FixtureRequest, tmp_path: Path) -> Workplace:
    request.getfixturevalue(request.param)
    workplace = workplace_in(tmp_path)
    configure(workplace)
    run_jobs_on(request.param, workplace)
    return workplace


@pytest.mark.timeout(600)
def test_pushes_are_trained_there_and_served_here(workplace: Workplace) -> None:
    with stack_up(workplace):
        checkout = clone(workplace)
        served = []
        for count in (8, 12):
            sha = checkout.push({"facts.jsonl": facts(0, count)})
            job = workplace.wait_for_job(sha)
            assert job["outcome"]["result"] == "promoted", f"{job}\n{workplace.logs()}"
            assert job["handle"].startswith("elsewhere:")
            served.append(job["outcome"]["release"])
        answer = httpx.post(
            f"{workplace.url('serving')}/v1/completions",
            json={"model": "facts", "prompt": "Shelf 3 holds", "max_tokens": 4},
            timeout=60,
        )
        assert answer.headers["X-Model-Release"] == served[1]
        assert answer.headers["X-Dataset-Revision"] == sha
        second = workplace.json("releases", "show", served[1])
        assert second["lineage"]["parent"] == served[0]
        folder = workplace.home / "jobs" / job["id"]
        assert "train" in (folder / "metrics.jsonl").read_text()
        assert (folder / "evaluation.json").exists()


@pytest.mark.timeout(600)
def test_two_machines_share_a_training(slurm: None, tmp_path: Path) -> None:
    workplace = workplace_in(tmp_path)
    configure(workplace)
    run_jobs_on("slurm", workplace, "{ cpus = 1, nodes = 2 }")
    with stack_up(workplace):
        sha = clone(workplace).push({"facts.jsonl": facts(0, 8)})
        job = workplace.wait_for_job(sha)
        log = (workplace.home / "jobs" / job["id"] / "log.txt").read_text()
        assert job["outcome"]["result"] == "promoted", f"{job}\n{log}\n{workplace.logs()}"
        assert "2 processes train together" in log
