"""The plan of a training: how long, in what steps, at which rate, on what."""

import pytest

from pipeline.retrain.lessons import replay_sample
from pipeline.retrain.settings import TrainSettings
from pipeline.retrain.tokens import Sequence
from pipeline.retrain.train import Lessons, Plan, learning_rate


def rows(count: int, length: int = 20) -> list[Sequence]:
    return [Sequence((7,) * length, (False, *(True,) * (length - 1)), row) for row in range(count)]


def plan(count: int, length: int = 20, **settings: object) -> Plan:
    told = TrainSettings.model_validate(settings)
    lessons = Lessons(
        training=rows(count, length),
        held_out=[],
        learning_rate=1.0,
        max_tokens=told.max_tokens,
        max_epochs=told.max_epochs,
    )
    return Plan.of(lessons, told)


def test_the_token_budget_bounds_a_large_dataset_and_the_epochs_a_small_one() -> None:
    large = plan(5_000, 100, max_tokens=50_000)
    trained = large.steps * large.blocks_per_step * large.block_length
    assert 50_000 <= trained < 70_000
    small = plan(100, 20, max_epochs=3)
    assert small.steps * small.blocks_per_step * small.block_length == pytest.approx(6_000, rel=0.2)


def test_small_datasets_get_small_steps_and_a_setting_overrides_it() -> None:
    assert plan(100).blocks_per_step * plan(100).block_length == 128
    assert plan(100, tokens_per_step=512).blocks_per_step == 4
    assert plan(1).steps >= 1


def test_the_learning_rate_rises_and_falls_to_a_tenth() -> None:
    rates = [learning_rate(step, 100, 1.0, 0.05) for step in range(100)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert rates[-1] == pytest.approx(0.1, abs=0.01)


def test_a_replay_sample_is_as_large_as_asked_and_the_same_each_time() -> None:
    settings = TrainSettings(replay_ratio=2.0, min_replay_tokens=100)
    few = replay_sample(rows(1), rows(500), settings)
    assert len(few) == 5
    many = replay_sample(rows(50), rows(500), settings)
    assert len(many) == 100
    assert many == replay_sample(rows(50), rows(500), settings)
    assert len(replay_sample(rows(50), rows(3), settings)) == 3
