"""The settings of a retraining job."""

import pytest
from pydantic import ValidationError

from pipeline.retrain.settings import TrainSettings


def test_what_never_was_a_key_is_an_error() -> None:
    with pytest.raises(ValidationError, match="held_out_ration"):
        TrainSettings.model_validate({"held_out_ration": 0.08})
