"""The whole loop with its jobs on an engine, where no folder of the stack is. In the container, the
job is another user in another root."""

import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engines import (
    RESOURCES,
    SECOND_RAY_NODE,
    output,
    podman,
    ray,
    run_jobs_on,
    second_ray_node,
    slurm,
)
from tests.integration.test_retrain_processes import told_of_steps
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


def told_by_ray(what: str, about: str) -> Any:
    return json.loads(output("ray", "list", what, f"--filter={about}", "--format=json"))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("engine", ["slurm", "ray"])
def test_two_machines_share_a_training(
    engine: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue(engine)
    workplace, alone = workplace_in(tmp_path), tmp_path / "alone"
    configure(workplace, checkpoint_url=str(tmp_path / "checkpoints"))
    run_jobs_on(engine, workplace, "{ cpus = 1, nodes = 2 }")
    another = second_ray_node() if engine == "ray" else nullcontext()
    with another, stack_up(workplace):
        sha = clone(workplace).push({"facts.jsonl": facts(0, 8)})
        job = workplace.wait_for_job(sha)
        folder = workplace.home / "jobs" / job["id"]
        log = (folder / "log.txt").read_text()
        assert job["outcome"]["result"] == "promoted", f"{job}\n{log}\n{workplace.logs()}"
        assert "2 processes train together" in log
        if engine == "ray":
            (task,) = told_by_ray("tasks", "name=_start_here")
            (node,) = told_by_ray("nodes", f"node_ip={SECOND_RAY_NODE}")
            assert task["node_id"] == node["node_id"]
        else:
            for name in ("one", "two"):
                said = Path(os.environ["SLURM_CONF"]).with_name(f"slurmd-{name}.log").read_text()
                assert "launch task" in said, said
        # The same job in one process, where there is no release yet.
        alone.mkdir()
        spec = json.loads((folder / "spec.json").read_text())
        spec["settings"] |= {f"{name}_dir": str(alone / name) for name in ("releases", "bases")}
        (alone / "spec.json").write_text(json.dumps(spec))
        here = {"JOB_DIR": str(alone), "JOB_ID": "alone", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "pipeline.retrain"]
        workplace.call(command, env={**workplace.users_env, **here})
    two, one = told_of_steps(folder), told_of_steps(alone)
    assert len(two) > 5 and [each[:3] for each in two] == [each[:3] for each in one]
    assert [each[3] for each in two] == pytest.approx([each[3] for each in one], rel=1e-3)
