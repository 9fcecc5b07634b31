"""Settings of the release before this one: told, passed over, and no error anywhere."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from jobs.spec import JobSpec
from pipeline.errors import PipelineError
from pipeline.retrain.checkpoint import Checkpoint
from pipeline.retrain.job import RetrainJob
from pipeline.retrain.settings import GateSettings, TrainSettings
from pipeline.settings import load_settings

TRAIN: dict[str, Any] = {
    "held_out_ratio": 0.08,
    "min_held_out_rows": 4,
    "max_row_bytes": 9,
    "evaluations": 12,
    "patience": 4,
    "enough_loss": 0.02,
}
GATE: dict[str, Any] = {
    "max_new_ratio": 1.01,
    "max_old_ratio": 1.02,
    "max_removal_ratio": 1.15,
    "tolerance": 0.01,
    "min_rows": 20,
    "sigmas": 2.0,
}


@pytest.mark.parametrize("key", TRAIN)
def test_a_removed_key_of_training_is_told_and_passed_over(
    key: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert TrainSettings.model_validate({key: TRAIN[key], "seed": 3}) == TrainSettings(seed=3)
    (told,) = caplog.messages
    assert key in told and "ignored" in told


@pytest.mark.parametrize("key", GATE)
def test_a_removed_key_of_the_gate_is_told_and_passed_over(
    key: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert GateSettings.model_validate({key: GATE[key]}) == GateSettings()
    assert key in caplog.text


@pytest.mark.parametrize("settings", [TrainSettings, GateSettings])
def test_a_key_that_never_was_is_still_an_error(settings: Any) -> None:
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        settings.model_validate({"patiense": 3})


def test_a_file_with_removed_keys_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tables = {"train": TRAIN | {"seed": 5}, "gate": GATE | {"min_kept": 0.5}}
    lines = ["[[pipelines]]", 'name = "facts"', 'dataset = "local/facts"']
    for table, values in tables.items():
        lines += [f"[pipelines.{table}]", *(f"{key} = {value}" for key, value in values.items())]
    path = tmp_path / "pipeline.toml"
    path.write_text("\n".join(lines))
    monkeypatch.setenv("PIPELINE_SETTINGS", str(path))
    with caplog.at_level(logging.WARNING):
        pipeline = load_settings().pipeline("facts")
    assert (pipeline.train.seed, pipeline.gate.min_kept) == (5, 0.5)
    assert "enough_loss" in caplog.text and "sigmas" in caplog.text
    path.write_text("\n".join([*lines, "min_learnt = 1"]))
    with pytest.raises(PipelineError, match="min_learnt"):
        load_settings()


def test_the_spec_of_a_queued_job_with_removed_keys_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec = JobSpec(
        command=("python", "-m", "pipeline.retrain"),
        pipeline="facts",
        settings={
            "pipeline": "facts",
            "dataset": "me/facts",
            "releases_dir": "r",
            "bases_dir": "b",
            "train": TRAIN | {"max_tokens": 7},
            "gate": GATE,
        },
    )
    (tmp_path / "spec.json").write_text(spec.model_dump_json())
    with caplog.at_level(logging.WARNING):
        job = RetrainJob.from_environment({"JOB_DIR": str(tmp_path), "JOB_ID": "j1"})
    assert job.settings.train.max_tokens == 7
    assert job.settings.gate == GateSettings()
    assert "patience" in caplog.text


def test_the_checkpoint_of_an_earlier_release_is_read(tmp_path: Path) -> None:
    old = {"job_id": "j1", "step": 9, "steps": 40, "tokens": 900, "best_step": 4, "best_loss": 2.5}
    found = Checkpoint.model_validate_json(json.dumps(old | {"file": "checkpoints/a.pt"}))
    assert (found.attempt, found.step, found.not_trained, found.finished) == (1, 9, (), False)
