"""Keys of an earlier release in settings files and in the specs of queued jobs."""

import logging
from pathlib import Path

import pytest
from pydantic import ValidationError

from pipeline.errors import PipelineError
from pipeline.retrain.settings import RetrainSettings, TrainSettings
from pipeline.settings import load_settings


def test_a_key_of_the_release_before_is_passed_over_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    spec = {
        "pipeline": "facts",
        "dataset": "me/facts",
        "releases_dir": "/r",
        "bases_dir": "/b",
        "train": {"held_out_ratio": 0.08, "min_held_out_rows": 4, "seed": 3},
    }
    with caplog.at_level(logging.WARNING):
        settings = RetrainSettings.model_validate(spec)
    assert settings.train == TrainSettings(seed=3)
    (record,) = caplog.records
    assert "held_out_ratio (" in record.getMessage()
    assert "min_held_out_rows (" in record.getMessage()


def test_what_never_was_a_key_is_an_error() -> None:
    with pytest.raises(ValidationError, match="held_out_ration"):
        TrainSettings.model_validate({"held_out_ration": 0.08})


def test_every_removed_key_says_what_there_is_in_its_place() -> None:
    for key, reason in TrainSettings.removed.items():
        assert key not in TrainSettings.model_fields and reason


def test_a_settings_file_may_have_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "pipeline.toml"
    monkeypatch.setenv("PIPELINE_SETTINGS", str(file))
    head = '[[pipelines]]\nname = "a"\ndataset = "me/a"\n'
    file.write_text(f"{head}[pipelines.train]\nmax_row_bytes = 7\n[pipelines.data]\nconfig = 'x'\n")
    (pipeline,) = load_settings().pipelines
    assert pipeline.data.config == "x"
    assert "max_row_bytes (set it under [pipelines.data])" in caplog.text
    file.write_text(f'{head}[pipelines.data.columns]\npromt = "question"\n')
    with pytest.raises(PipelineError, match=r"did you mean 'prompt'\?"):
        load_settings()
