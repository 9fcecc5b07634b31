"""Several training processes: the losses of one, and their faults told like its own."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jobs.agent import NICENESS, Attempt, ForkServer
from jobs.outcome import JobOutcome
from jobs.process import IS_LINUX, process_here
from jobs.settings import JobsSettings
from jobs.spec import JobSpec
from jobs.store import JobStore
from pipeline.retrain.checkpoint import Checkpoint
from pipeline.retrain.job import read_metrics
from pipeline.retrain.job import read_record as read_job_record
from tests.jobs_fixtures import until
from tests.jobs_program import session_niceness
from tests.retrain_fixtures import Pipeline, facts, few_anchors, jsonl, tiny_base, tiny_preset

__all__ = ["tiny_preset"]

TRAIN = {"max_tokens": 4_000, "tokens_per_step": 512, "learning_rate": 1e-3, "lora_rank": 0}
GATE = {"min_learned": 0.0, "max_base_drift": 1.0}


@pytest.fixture
def base(tmp_path: Path) -> str:
    return tiny_base(tmp_path)


@pytest.mark.slow
def test_two_processes_give_the_losses_of_one(
    tmp_path: Path, base: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Also of steps with one block, which they share row by row, and of small batches."""
    caplog.set_level("INFO")
    curves = []
    for count, micro_batch_tokens in ((1, 8_192), (2, 128)):
        settings = {
            "num_processes": count,
            "tokens_per_step": 128,
            "max_tokens": 1_500,
            "micro_batch_tokens": micro_batch_tokens,
            "anchors": few_anchors(tmp_path),
        }
        pipeline = Pipeline(
            tmp_path / str(count), base_model=base, train=TRAIN | settings, gate=GATE
        )
        outcome = pipeline.learn({"a.jsonl": jsonl(facts(num_places=30))})
        assert outcome.result == "published", outcome.reason
        metrics, _ = read_metrics(pipeline.home / "jobs/job-0/metrics.jsonl")
        curves.append([(each.event, each.step, each.loss) for each in metrics if each.step])
    told = re.findall(r"(\S+ rows to learn, .*);", caplog.text)
    assert len(told) == 2 and told[0] == told[1], "the budget buys the same"
    one, two = curves
    assert len(one) > 8
    assert [each[:2] for each in one] == [each[:2] for each in two]
    assert [each[2] for each in two] == pytest.approx([each[2] for each in one], abs=1e-3)


@pytest.mark.slow
def test_processes_that_break_off_say_why(tmp_path: Path, base: str) -> None:
    endless = TRAIN | {"learning_rate": 1e30, "max_grad_norm": 1e30, "num_processes": 2}
    endless |= {"anchors": few_anchors(tmp_path)}
    pipeline = Pipeline(tmp_path / "home", base_model=base, train=endless)
    outcome = pipeline.learn({"a.jsonl": jsonl(facts(num_places=30))})
    assert (outcome.result, outcome.stage) == ("failed", "train")
    assert "training diverged at learning rate" in str(outcome.reason)


AFTER_A_GROUP = """
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from pipeline.retrain.checkpoint import process_group

def threads():
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    return ", ".join(name.strip() for name in names if "gloo" in name)


with process_group(0, 1, f"file://{sys.argv[1]}"):
    from transformers import LlamaForCausalLM

    dist.all_reduce(torch.ones(1))
    if not threads():
        sys.exit("a group has no threads that this would find")
sys.exit(threads() or 0)
"""


@pytest.mark.slow
@pytest.mark.skipif(not IS_LINUX, reason="threads are found in /proc")
def test_a_group_leaves_no_thread_behind(tmp_path: Path) -> None:
    """One that is still there at the interpreter's end can abort it."""
    script = tmp_path / "after_a_group.py"
    script.write_text(AFTER_A_GROUP)
    command = [sys.executable, str(script), str(tmp_path / "group")]
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    found = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr


def processes_of(folder: Path) -> list[int]:
    """However they came to be, and whatever session they are in."""
    mark = os.fsencode(f"JOB_DIR={folder}")
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark in environment.read_bytes().split(b"\0"):
                found.append(int(environment.parent.name))
        except OSError:
            continue
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not IS_LINUX, reason="processes are found in /proc")
def test_no_process_outlives_the_agent_of_its_job_and_the_training_goes_on(
    tmp_path: Path, base: str
) -> None:
    train = TRAIN | {"num_processes": 2, "checkpoint_seconds": 0.01, "max_tokens": 8_000}
    train |= {"anchors": few_anchors(tmp_path)}
    pipeline = Pipeline(tmp_path, base_model=base, train=train, gate=GATE)
    folder = pipeline.job(pipeline.commit({"a.jsonl": jsonl(facts(num_places=30))}))
    store = JobStore.open(tmp_path / "jobs.db")
    # With `exec`, the variables of the job can be seen in /proc.
    command = ("sh", "-c", f"exec {sys.executable} -m pipeline.retrain")
    store.submit(JobSpec(command=command))
    job = store.claim("me", 600)
    assert job is not None
    ForkServer(()).start(
        Attempt(
            job_id=job.id,
            owner="me",
            store=store.location,
            jobs_dir=tmp_path / "agents",
            command=command,
            env=pipeline.environ(folder),
            settings=JobsSettings(),
        )
    )
    agent = process_here(until(lambda: store.get(job.id).handle))
    assert agent is not None
    try:
        until(lambda: read_job_record(folder / "checkpoint.json", Checkpoint), seconds=240)
        training = processes_of(folder)
        assert len(training) >= 3, "the job, and two that train"
        assert {os.getpriority(os.PRIO_PROCESS, pid) for pid in training} == {NICENESS}
        assert {session_niceness(pid) for pid in training} <= {NICENESS, None}
    finally:
        os.kill(agent.pid, signal.SIGKILL)
        store.close()
    until(lambda: not processes_of(folder), seconds=10)
    saved = read_job_record(folder / "checkpoint.json", Checkpoint)
    assert saved is not None and not saved.finished

    assert pipeline.run(folder).result == "published"
    metrics, _ = read_metrics(folder / "metrics.jsonl")
    steps = [metric.step for metric in metrics if metric.event == "step"]
    assert steps.count(1) == 1
    done = read_job_record(folder / "checkpoint.json", Checkpoint)
    assert done is not None and steps[-1] == done.step > saved.step


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not IS_LINUX, reason="processes are found in /proc")
def test_the_next_attempt_goes_on_after_a_training_process_was_killed(
    tmp_path: Path, base: str
) -> None:
    train = TRAIN | {"num_processes": 2, "checkpoint_seconds": 0.01, "max_tokens": 8_000}
    train |= {"anchors": few_anchors(tmp_path)}
    pipeline = Pipeline(tmp_path, base_model=base, train=train, gate=GATE)
    folder = pipeline.job(pipeline.commit({"a.jsonl": jsonl(facts(num_places=30))}))
    job = pipeline.start(folder)
    try:
        until(lambda: read_job_record(folder / "checkpoint.json", Checkpoint), seconds=240)
        os.kill(max({*processes_of(folder)} - {job.pid}), signal.SIGKILL)
        assert job.wait(120) == 1, (folder / "log.txt").read_text()
    finally:
        job.kill()
        job.wait()
    outcome = JobOutcome.model_validate_json((folder / "outcome.json").read_bytes())
    assert outcome.may_pass and "processes ended too early" in str(outcome.reason)
    assert pipeline.run(folder).result == "published"
    metrics, _ = read_metrics(folder / "metrics.jsonl")
    steps = [metric.step for metric in metrics if metric.event == "step"]
    assert steps.count(1) == 1
