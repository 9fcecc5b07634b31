"""The plan of a training: how long, in what steps, at which rate, on what."""

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.retrain.lessons import delta_mix
from pipeline.retrain.settings import TrainSettings
from pipeline.retrain.tokens import Sequence
from pipeline.retrain.train import Lessons, Plan, _steps, learning_rate


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
    # A hundred and twenty-eight tokens hold one such row: these are tokens of rows, not of blocks.
    assert (large.block_length, large.blocks) == (128, 500)
    small = plan(96, 20, max_epochs=3)
    assert (small.block_length, small.blocks) == (128, 3 * 96 / 6)


@given(
    lengths=st.lists(st.integers(2, 150), min_size=1, max_size=60),
    epochs=st.floats(0.3, 4),
    max_tokens=st.integers(1, 9_000),
    tokens_per_step=st.integers(1, 2_000),
    skip=st.integers(0, 5),
)
def test_the_steps_are_those_of_the_plan_and_keep_to_its_tokens(
    lengths: list[int], epochs: float, max_tokens: int, tokens_per_step: int, skip: int
) -> None:
    training = [rows(1, length)[0] for length in lengths]
    lessons = Lessons(
        training=training,
        held_out=[],
        learning_rate=1.0,
        max_tokens=max_tokens,
        max_epochs=epochs,
    )
    found = Plan.of(lessons, TrainSettings(tokens_per_step=tokens_per_step))
    steps = list(_steps(training, found, 0, skip=0))
    assert len(steps) == found.steps
    assert steps[skip:] == list(_steps(training, found, 0, skip=skip))
    blocks = [block for step in steps for block in step]
    assert len(blocks) == found.blocks
    seen = Counter(index for block in blocks for index in block)
    assert max(seen.values()) <= math.ceil(epochs)
    if len(blocks) > 1:
        assert sum(lengths[index] * count for index, count in seen.items()) <= max_tokens


def test_an_epoch_is_every_row_once() -> None:
    training = rows(61, 50)
    lessons = Lessons(
        training=training, held_out=[], learning_rate=1.0, max_tokens=10**6, max_epochs=1.0
    )
    found = Plan.of(lessons, TrainSettings(tokens_per_step=1_000))
    seen = [
        index for step in _steps(training, found, 0, skip=0) for block in step for index in block
    ]
    assert sorted(seen) == list(range(61))


def test_small_datasets_get_small_steps_and_a_setting_overrides_it() -> None:
    assert plan(100).blocks_per_step * plan(100).block_length == 128
    assert plan(100, tokens_per_step=512).blocks_per_step == 4
    assert plan(1).steps >= 1


def test_the_learning_rate_rises_and_falls_to_a_tenth() -> None:
    rates = [learning_rate(step, 100, 1.0, 0.05) for step in range(100)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert rates[-1] == pytest.approx(0.1, abs=0.01)


def test_a_delta_sees_new_rows_often_and_as_much_of_the_known_ones_without_repeating_any() -> None:
    settings = TrainSettings(delta_max_epochs=3, replay_ratio=2.0, min_replay_tokens=100)
    new, known = rows(10), rows(500)[100:]
    mix = delta_mix(new, known, 100_000, settings)
    counts = Counter(sequence.row for sequence in mix)
    assert {counts[row] for row in range(10)} == {3}
    assert sum(count for row, count in counts.items() if row >= 100) == 60
    assert max(count for row, count in counts.items() if row >= 100) == 1
    assert mix == delta_mix(new, known, 100_000, settings)


def test_a_delta_keeps_to_its_tokens_and_replays_a_little_for_a_single_row() -> None:
    settings = TrainSettings(delta_max_epochs=3, replay_ratio=1.0, min_replay_tokens=100)
    bounded = delta_mix(rows(100), rows(500)[100:], 400, settings)
    assert Counter(sequence.row < 100 for sequence in bounded) == {True: 10, False: 10}
    assert len(delta_mix(rows(1), rows(500)[100:], 100_000, settings)) == 3 + 5
    assert len(delta_mix(rows(1), rows(101)[100:], 100_000, settings)) == 3 + 3
    assert len(delta_mix(rows(1), [], 100_000, settings)) == 3
