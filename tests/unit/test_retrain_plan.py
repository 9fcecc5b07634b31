"""The plan of a training: on what, for how many tokens, in what steps, at which rate."""

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.retrain.base_model import train_tokenizer
from pipeline.retrain.checkpoint import TrainingState
from pipeline.retrain.data import TrainingData
from pipeline.retrain.errors import DataError
from pipeline.retrain.model import usual_rank
from pipeline.retrain.plan import (
    CATCH_UP,
    TrainingPlan,
    in_turn,
    make_plan,
    usual_learning_rate,
)
from pipeline.retrain.rows import Row, contradictions
from pipeline.retrain.settings import RetrainSettings
from pipeline.retrain.tokens import TokenSequence
from pipeline.retrain.train import _rate
from tests.training_fixtures import num_tokens, plan_of, rows

TOKENIZER = train_tokenizer([Row(text="a question and its answer", file="a", number=0)])


def facts(count: int, first: int = 0, answer: str = "it is") -> tuple[Row, ...]:
    return tuple(
        Row(prompt=f"What is {number}?", completion=f" {answer} {number}.", file="a", number=number)
        for number in range(first, first + count)
    )


def texts(count: int, first: int = 0) -> tuple[Row, ...]:
    return tuple(
        Row(text=f"Text number {number} of many.", file="t", number=number)
        for number in range(first, first + count)
    )


def data(**fields: Any) -> TrainingData:
    told = {"changed": (), "known": (), "deleted": (), "mode": "full"} | fields
    everything = (*told["known"], *told["changed"])
    contradicting = (index for group in contradictions(everything) for index in group)
    return TrainingData(
        **{
            "reason": "",
            "digest": "",
            "rows": everything,
            "edited": (),
            "held_out": (),
            "held_out_trained": frozenset(),
            "contradicting": frozenset(everything[index].digest for index in contradicting),
            "num_before": 0,
            "num_waiting": 0,
            "missed_before": frozenset(),
            "dataset": None,
            **told,
        }
    )


def settings(*, base_model: str = "preset:tiny", **train: Any) -> RetrainSettings:
    return RetrainSettings(
        pipeline="facts",
        dataset="me/facts",
        base_model=base_model,
        releases_dir=Path("r"),
        bases_dir=Path("b"),
        train=train,
    )


def plan(of: TrainingData, told: RetrainSettings | None = None, **more: Any) -> TrainingPlan:
    return make_plan(of, TOKENIZER, told or settings(), max_length=256, **more)


def test_a_full_training_learns_all_rows_and_ends_when_they_are_right() -> None:
    found = plan(data(changed=facts(30), known=facts(10, 50)))
    assert len(found.learned) == len(found.counted) == 40
    assert found.ends_when_right
    assert (found.replayed, found.replay_ratio) == ([], 0.0)
    assert found.max_tokens == 3 * 250_000
    assert found.learning_rate == 1e-3


def test_a_delta_learns_what_changed_and_replays_what_is_known() -> None:
    told = settings(max_tokens=10_000, delta_tokens_ratio=0.25, delta_learning_rate_ratio=0.5)
    known, gone = facts(40, 50), facts(2, 200)
    of = data(mode="delta", changed=facts(3), known=known, deleted=gone)
    found = plan(of, told, said=known[:10])
    # Three changed rows, and two deleted ones with empty answers.
    lengths = [found.sequences[index].num_learned for index in found.learned]
    assert min(lengths[:3]) > 1 and lengths[3:] == [1, 1]
    assert len(found.replayed) == 40
    assert found.max_tokens == 3 * 10_000, "it ends when the rows are right"
    assert found.learning_rate == 5e-4
    assert found.replay_ratio == 3.0
    # Measured before it ends: the changed rows, and known ones that the served weights say.
    assert len(found.checked) == 3 + 2 + 10
    assert set(found.counted) < set(found.checked)


def test_text_that_is_deleted_is_not_unlearned_and_one_without_known_rows_replays_nothing() -> None:
    found = plan(data(mode="delta", changed=facts(3), deleted=texts(1)))
    assert len(found.learned) == 3 and found.replay_ratio == 0.0


def test_a_full_training_goes_as_far_as_deltas_have_gone_but_not_without_end() -> None:
    told = settings(max_tokens=1_000)
    assert plan(data(changed=facts(3)), told, tokens_before=3_500).max_tokens == 3_500
    assert plan(data(changed=facts(3)), told, tokens_before=10**9).max_tokens == CATCH_UP * 1_000


def test_rows_that_contradict_each_other_are_learned_and_not_counted() -> None:
    both = (*facts(1), *facts(1, answer="it was"), *facts(5, 1))
    found = plan(data(changed=both))
    assert len(found.learned) == 7
    assert sorted(found.counted) == [2, 3, 4, 5, 6]


def test_a_delta_of_nothing_names_what_to_do() -> None:
    with pytest.raises(DataError, match=r"a delta has nothing to learn; run .* --mode full"):
        plan(data(mode="delta", known=facts(3)))


def test_text_ends_after_its_passes_or_its_budget() -> None:
    told = settings(max_epochs=3, max_tokens=10**6)
    found = plan(data(changed=texts(20)), told)
    assert not found.ends_when_right
    assert found.max_tokens == 3 * num_tokens(found, found.learned)
    assert plan(data(changed=texts(20)), settings(max_tokens=50)).max_tokens == 50


def test_a_delta_on_text_keeps_to_its_passes_and_replays_a_little_for_a_single_row() -> None:
    told = settings(delta_max_epochs=2, replay_ratio=1.0, min_replay_tokens=100, max_tokens=10**6)
    found = plan(data(mode="delta", changed=texts(1), known=texts(400, 1)), told)
    size = 2 * num_tokens(found, found.learned)
    assert found.max_tokens == size + 100
    assert found.replay_ratio == 100 / size
    few = plan(data(mode="delta", changed=texts(1), known=texts(1, 1)), told)
    assert few.max_tokens == size + 2 * num_tokens(few, few.replayed)
    bounded = settings(replay_ratio=3.0, min_replay_tokens=1, max_tokens=1_000)
    some = plan(data(mode="delta", changed=texts(2), known=texts(400, 100)), bounded)
    assert some.max_tokens == 240
    assert some.replay_ratio == pytest.approx(3.0)


def test_a_delta_on_text_sees_each_changed_row_once_beside_as_many_known_tokens() -> None:
    new, known = texts(40), texts(400, 100)
    found = plan(data(mode="delta", changed=new, known=known), settings(max_tokens=10_000))
    one_pass = num_tokens(found, found.learned)
    told = settings(max_tokens=3 * one_pass, delta_tokens_ratio=0.1, replay_ratio=3.0)
    found = plan(data(mode="delta", changed=new, known=known), told)
    assert found.max_tokens == 2 * one_pass, "a tenth of the budget would not see them"
    assert found.replay_ratio == 1.0
    scarce = plan(data(mode="delta", changed=new, known=known), settings(max_tokens=one_pass))
    assert scarce.max_tokens == one_pass, "never more than a full training"
    assert scarce.replay_ratio == pytest.approx(1.0, abs=0.01)


def test_nothing_to_learn_is_an_error() -> None:
    with pytest.raises(DataError, match="no row has anything to learn"):
        plan(data(changed=(Row(text="", file="a", number=0),)))


def test_base_models_that_were_trained_before_get_low_rank_matrices_and_their_own_rates() -> None:
    assert (usual_rank(settings()), usual_learning_rate(settings())) == (0, 1e-3)
    base = settings(base_model="me/it")
    assert (usual_rank(base), usual_learning_rate(base)) == (64, 1e-3)
    whole = settings(base_model="me/it", lora_rank=0)
    assert (usual_rank(whole), usual_learning_rate(whole)) == (0, 5e-5)
    assert plan(data(changed=facts(2)), settings(learning_rate=0.5)).learning_rate == 0.5


def test_steps_are_a_thousandth_of_the_budget_within_bounds_unless_they_are_set() -> None:
    def step_tokens(**train: Any) -> int:
        return plan(data(changed=facts(3)), settings(**train)).step_tokens

    assert step_tokens() == 250
    assert step_tokens(max_tokens=1) == 128
    assert step_tokens(max_tokens=10**9) == 4_096
    assert step_tokens(tokens_per_step=77) == 77


def test_a_base_model_gets_larger_steps_if_a_pass_has_enough_of_them() -> None:
    def step_tokens(count: int, **fields: Any) -> int:
        found = data(changed=facts(count), **fields)
        return plan(found, settings(base_model="me/it", wordings=0)).step_tokens

    assert step_tokens(3) == 250
    assert 250 < step_tokens(250) < 448
    assert step_tokens(3_000) == 448
    assert step_tokens(3_000, mode="delta") == 250


def test_anchors_are_mixed_in_where_there_are_any() -> None:
    assert plan(data(changed=facts(2))).anchor_ratio == 0.0
    anchor: Any = object()
    found = plan(data(changed=facts(2)), anchors=(anchor,))
    assert (found.anchor_ratio, found.anchors) == (0.5, (anchor,))
    delta = plan(data(changed=facts(2), known=facts(3), mode="delta"), anchors=(anchor,))
    assert delta.anchor_ratio == 1.0


@given(
    sizes=st.lists(st.integers(2, 40), min_size=1, max_size=30),
    asked=st.lists(st.integers(1, 300), min_size=1, max_size=20),
)
def test_no_known_row_comes_again_before_all_came_once(sizes: list[int], asked: list[int]) -> None:
    known = [
        TokenSequence((7,) * size, (False, *(True,) * (size - 1)), row)
        for row, size in enumerate(sizes)
    ]
    found = plan_of(rows(1), replayed=known)
    seen: Counter[int] = Counter()
    taken = 0
    for tokens in asked:
        chosen = in_turn(found.replayed, taken, tokens, found.sequences.__getitem__)
        taken += len(chosen)
        assert len(set(chosen)) == len(chosen)
        assert num_tokens(found, chosen) >= min(tokens, sum(sizes))
        seen.update(chosen)
        assert max(seen.values()) <= math.ceil(taken / len(sizes)), "once in each round"


def test_the_rate_rises_and_falls_to_a_tenth_with_the_tokens_of_a_text() -> None:
    found = plan_of(rows(10), max_tokens=10_000, tokens_per_step=100, warm_up_steps=5)
    rates = [_rate(found, TrainingState(step=step, tokens=100 * step)) for step in range(100)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert rates[-1] == pytest.approx(0.1, abs=0.01)
