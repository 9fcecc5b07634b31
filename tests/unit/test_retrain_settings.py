"""Keys that there are not, in settings files and in the specs of queued jobs."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from pipeline.errors import PipelineError
from pipeline.retrain.settings import TrainSettings
from pipeline.settings import load_settings


def test_what_is_no_key_is_an_error() -> None:
    with pytest.raises(ValidationError, match="held_out_ratio"):
        TrainSettings.model_validate({"held_out_ratio": 0.08})


def test_a_settings_file_with_a_wrong_key_is_told_a_right_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "pipeline.toml"
    monkeypatch.setenv("PIPELINE_SETTINGS", str(file))
    head = '[[pipelines]]\nname = "a"\ndataset = "me/a"\n'
    file.write_text(f'{head}[pipelines.data.columns]\npromt = "question"\n')
    with pytest.raises(PipelineError, match=r"did you mean 'prompt'\?"):
        load_settings()
