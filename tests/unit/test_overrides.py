"""Settings for one run, and what a release records of them."""

import pytest

from pipeline.errors import PipelineError
from pipeline.retrain.settings import TrainSettings
from pipeline.settings import PipelineSettings
from pipeline.submit import override

FACTS = PipelineSettings(name="facts", dataset="local/facts", train=TrainSettings(seed=3))


def test_values_are_written_as_in_toml_and_checked_as_settings_are() -> None:
    assignments = [
        "train.max_tokens=500_000",
        "train.mode=full",
        'data.files=["a.jsonl"]',
        "gate.min_kept = 0.5",
    ]
    changed = override(FACTS, assignments)
    assert (changed.train.max_tokens, changed.train.mode) == (500_000, "full")
    assert (changed.data.files, changed.gate.min_kept) == (("a.jsonl",), 0.5)
    assert changed.train.seed == 3, "what is not named stays"
    assert override(FACTS, []) == FACTS


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("train.max_token=5", r"unknown key 'max_token'.*did you mean 'max_tokens'"),
        ("train.max_tokens=many", "'max_tokens'.*integer.*'many'"),
        ("train.max_tokens=0", "'max_tokens'.*greater than or equal to 1"),
        ("train.mode=half", "'mode'.*'half'"),
        ("tain.mode=full", "unknown table 'tain'; known: .*train"),
        ("name=other", "is not TABLE.KEY=VALUE"),
        ("train.mode", "is not TABLE.KEY=VALUE"),
    ],
)
def test_a_key_that_is_wrong_is_named(assignment: str, message: str) -> None:
    with pytest.raises(PipelineError, match=message):
        override(FACTS, [assignment])


def test_the_digest_tells_settings_that_shape_the_weights_from_those_that_do_not() -> None:
    plain = TrainSettings().digest()
    assert TrainSettings(max_tokens=7).digest() != plain
    assert TrainSettings(max_tokens=TrainSettings().max_tokens).digest() == plain
    assert TrainSettings(checkpoint_seconds=1, num_processes=2).digest() == plain
