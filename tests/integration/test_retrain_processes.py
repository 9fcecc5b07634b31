"""Several training processes: the losses of one, and their faults told like its own."""

from pathlib import Path

import pytest
import torch

from pipeline.retrain.base_model import base_folder
from pipeline.retrain.metrics import read_metrics
from pipeline.retrain.rows import Row
from tests.retrain_fixtures import Pipeline, facts, jsonl

TRAIN = {"max_tokens": 4_000, "tokens_per_step": 512, "learning_rate": 1e-3, "evaluations": 3}


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A checkpoint folder: the processes do not see a preset that a test has changed."""
    from pipeline.retrain import base_model
    from tests.retrain_fixtures import TINY

    torch.set_num_threads(1)
    monkeypatch.setitem(base_model.PRESETS, "preset:tiny", TINY)
    return str(base_folder("preset:tiny", tmp_path, [Row(text=" ", file="a", number=0)], seed=0))


def test_two_processes_give_the_losses_of_one(tmp_path: Path, base: str) -> None:
    curves = []
    for count in (1, 2):
        pipeline = Pipeline(
            tmp_path / str(count), base_model=base, train=TRAIN | {"num_processes": count}
        )
        outcome = pipeline.learn({"a.jsonl": jsonl(facts(num_places=30))})
        assert outcome.result == "published", outcome.reason
        metrics, _ = read_metrics(pipeline.home / "jobs/job-0/metrics.jsonl")
        curves.append([(each.event, each.step, each.loss) for each in metrics if each.step])
    one, two = curves
    assert len(one) > 8
    assert [each[:2] for each in one] == [each[:2] for each in two]
    assert [each[2] for each in two] == pytest.approx([each[2] for each in one], abs=1e-3)


def test_processes_that_break_off_say_why(tmp_path: Path, base: str) -> None:
    endless = TRAIN | {"learning_rate": 1e30, "max_grad_norm": 1e30, "num_processes": 2}
    pipeline = Pipeline(tmp_path / "home", base_model=base, train=endless)
    outcome = pipeline.learn({"a.jsonl": jsonl(facts(num_places=30))})
    assert (outcome.result, outcome.stage) == ("failed", "train")
    assert "training diverged at learning rate" in str(outcome.reason)
