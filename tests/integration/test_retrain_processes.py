"""One training in two processes: it learns what one process learns, and outlives a killed one."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from jobs.errors import TEMPORARY_FAILURE
from jobs.outcome import JobOutcome
from pipeline.retrain.checkpoint import Checkpoint
from pipeline.retrain.job import read_metrics, read_record
from pipeline.retrain.processes import start
from tests.jobs_fixtures import until
from tests.retrain_fixtures import Pipeline, facts, few_anchors, jsonl, tiny_base
from tests.training_fixtures import stored_weights

ROOT = Path(__file__).parents[2]
PROGRAM = str(ROOT / "tests/training_processes_program.py")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def told_of_steps(job_dir: Path) -> list[tuple[str, int | None, int | None, float | None]]:
    """The event, tokens, right answers and loss of each step and measurement."""
    metrics, _ = read_metrics(job_dir / "metrics.jsonl")
    # The end of a pass, which has no loss, may be told again after a restart.
    measured = [each for each in metrics if each.loss is not None]
    return [(each.event, each.tokens, each.right, each.loss) for each in measured]


def trained(folder: Path, lora_rank: int, *launcher: str) -> tuple[list[Any], dict[str, Any], int]:
    """What was told of each step, the weights, and how many weights the last process had."""
    folder.mkdir()
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, PROGRAM, str(folder), str(lora_rank)]
    if launcher:  # all processes end in step 9, and the training goes on from its checkpoint
        ended = subprocess.run([*command, "9"], env=environ, check=False, timeout=200)
        assert ended.returncode == 1
    subprocess.run(command, env=environ, check=True, timeout=200)
    weights = stored_weights(folder / "checkpoints/best-full")
    number = max(folder.glob("parameters-*")).read_text()
    return told_of_steps(folder), weights, int(number)


@pytest.mark.parametrize(("cpus", "code", "ended"), [("8", 1, 1), (None, 3, TEMPORARY_FAILURE)])
def test_on_several_machines_srun_starts_it_with_the_cpus_that_sbatch_got(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpus: str | None, code: int, ended: int
) -> None:
    srun = tmp_path / "srun"
    srun.write_text(f'#!/bin/sh\necho "$MASTER_ADDR $*" >$0.called; exit {code}\n')
    srun.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("SLURM_CPUS_PER_TASK", raising=False)
    if cpus is not None:
        monkeypatch.setenv("SLURM_CPUS_PER_TASK", cpus)
    assert start(4, 2) == ended
    words = (tmp_path / "srun.called").read_text().split()
    assert words[0] == socket.gethostname() and words[-3:] == ["pipeline.retrain", "4", "2"]
    assert {"--nodes=4", "--ntasks-per-node=1"} <= set(words)
    assert [each for each in words if "cpus" in each] == [f"--cpus-per-task={cpus}"] * bool(cpus)


def test_on_several_machines_of_ray_it_needs_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SystemExit, match=r"needs the Python package `ray`: install") as ended:
        start(2, 1)
    assert isinstance(ended.value.code, str)  # Python prints it and exits with 1


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("lora_rank", [0, 4])
def test_two_processes_with_half_of_the_weights_learn_what_one_learns(
    tmp_path: Path, lora_rank: int
) -> None:
    one, weights, number = trained(tmp_path / "one", lora_rank)
    two, same, half = trained(tmp_path / "two", lora_rank, *TORCHRUN)
    assert len(one) > 20
    assert [each[:3] for each in two] == [each[:3] for each in one]
    assert [each[3] for each in two] == pytest.approx([each[3] for each in one], rel=1e-6)
    assert half == number / 2
    torch.testing.assert_close(same, weights, rtol=0, atol=1e-5)


def test_a_job_that_crashes_in_a_library_says_where() -> None:
    code = "import os, runpy; from pipeline.retrain import run; run.main = os.abort; "
    code += "runpy.run_module('pipeline.retrain', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGABRT
    assert b"in _main" in done.stderr


def workers(job: "subprocess.Popen[bytes]") -> list[psutil.Process]:
    found = psutil.Process(job.pid).children()
    return [each for each in found if "pipeline.retrain" in each.cmdline()]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_process_ends_the_attempt_and_the_next_goes_on(
    tmp_path: Path, killed: int
) -> None:
    train = {"max_tokens": 6_000, "tokens_per_step": 512, "learning_rate": 1e-3}
    train |= {"checkpoint_seconds": 0.01, "anchors": few_anchors(tmp_path), "lora_rank": killed}
    gate = {"min_learned": 0.0, "max_base_drift": 1.0}
    pipeline = Pipeline(tmp_path, base_model=tiny_base(tmp_path), train=train, gate=gate)
    folder = pipeline.job(pipeline.commit({"a.jsonl": jsonl(facts(num_places=30))}))
    job = pipeline.start(folder, "1", "2")
    try:
        until(lambda: read_record(folder / "checkpoint.json", Checkpoint), seconds=240)
        (worker,) = [each for each in workers(job) if each.environ()["RANK"] == str(killed)]
        others = workers(job)
        worker.send_signal(signal.SIGKILL)
        assert job.wait(120) == TEMPORARY_FAILURE, (folder / "log.txt").read_text()
        assert not [each for each in others if each.is_running()]
    finally:
        job.kill()
        job.wait()
    if (folder / "outcome.json").exists():
        outcome = JobOutcome.model_validate_json((folder / "outcome.json").read_bytes())
        assert outcome.may_pass and "ended too early" in str(outcome.reason)
        (folder / "outcome.json").unlink()
    saved = read_record(folder / "checkpoint.json", Checkpoint)
    assert saved is not None and not saved.finished

    assert pipeline.start(folder, "1", "2").wait(240) == 0, (folder / "log.txt").read_text()
    outcome = JobOutcome.model_validate_json((folder / "outcome.json").read_bytes())
    assert outcome.result == "published", outcome.reason
    metrics, _ = read_metrics(folder / "metrics.jsonl")
    steps = [metric.step for metric in metrics if metric.event == "step"]
    done = read_record(folder / "checkpoint.json", Checkpoint)
    assert done is not None and steps[-1] == done.step > saved.step
    assert steps.count(1) == 1
