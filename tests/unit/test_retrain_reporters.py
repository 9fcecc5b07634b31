"""Reporters: told every step, missing ones named before the training."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline.retrain.errors import RetrainError
from pipeline.retrain.metrics import MetricsWriter, read_metrics
from pipeline.retrain.reporters import check_reporters, open_reporters


def test_a_reporter_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    check_reporters(())
    monkeypatch.setattr("pipeline.retrain.reporters.find_spec", lambda name: None)
    with pytest.raises(RetrainError, match="names wandb, which is not installed: pip install"):
        check_reporters(("wandb",))


def test_steps_and_evaluations_are_told_and_written(tmp_path: Path) -> None:
    told = []
    metrics = MetricsWriter(tmp_path / "metrics.jsonl")
    with metrics.reporting_to((lambda values, step: told.append((dict(values), step)),)):
        metrics.write("train", "step", step=1, steps=9, loss=2.0, learning_rate=0.1)
        metrics.write("train", "evaluation", step=1, steps=9, loss=3.0)
    metrics.write("train", "end", seconds=1.0)
    assert told == [
        ({"train/loss": 2.0, "train/learning_rate": 0.1}, 1),
        ({"held_out/loss": 3.0}, 1),
    ]
    assert len(read_metrics(tmp_path / "metrics.jsonl")[0]) == 3


def test_wandb_is_offline_and_stores_in_the_jobs_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[object] = []

    class FakeRun:
        def __enter__(self) -> "FakeRun":
            return self

        def __exit__(self, *_: object) -> None:
            calls.append("finished")

        def log(self, values: object, step: int) -> None:
            calls.append((values, step))

    def init(**arguments: object) -> FakeRun:
        calls.append(arguments)
        return FakeRun()

    monkeypatch.setenv("WANDB_MODE", "")
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))  # type: ignore[arg-type]
    with open_reporters(("wandb",), folder=tmp_path, pipeline="facts", job_id="j1") as (report,):
        report({"train/loss": 1.0}, 3)
    where = {"project": "facts", "name": "j1", "dir": str(tmp_path / "wandb")}
    assert calls == [where, ({"train/loss": 1.0}, 3), "finished"]
    assert os.environ["WANDB_MODE"] == "offline"


def test_tensorboard_leaves_its_events_in_the_jobs_folder(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    names = ("tensorboard",)
    with open_reporters(names, folder=tmp_path, pipeline="facts", job_id="j1") as (report,):
        report({"train/loss": 1.5}, 3)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (event,) = events.Scalars("train/loss")
    assert (event.step, event.value) == (3, 1.5)
