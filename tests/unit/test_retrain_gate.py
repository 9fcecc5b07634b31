"""The gate: what it refuses and what it lets through, by counts, losses and rows alone."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.counts import Counts
from pipeline.retrain.evaluate import (
    MIN_ROWS,
    Judged,
    count_refusals,
    kept_refusals,
    loss_refusals,
    lost_refusals,
    not_learned,
)
from pipeline.retrain.loss import RowLoss
from pipeline.retrain.rows import Row
from pipeline.retrain.settings import GateSettings

GATE = GateSettings()
ROW = Row(text="a", file="a", number=0)


def refused(counts: Counts, gate: GateSettings = GATE, **places: tuple[str, ...]) -> str:
    return "; ".join(count_refusals(counts, gate, **places))


def test_nothing_measured_and_everything_right_pass() -> None:
    assert refused(Counts()) == ""
    assert refused(Counts(changed=3, learned=3, known=9, kept=9, deleted=1, unlearned=1)) == ""


def test_a_share_of_the_changed_rows_must_be_learned_and_the_first_five_others_are_named() -> None:
    assert refused(Counts(changed=10, learned=9)) == ""
    missed = tuple(f"a.jsonl, line {number}" for number in range(1, 9))
    reason = refused(Counts(changed=10, learned=2), missed=missed)
    assert "only 2 of 10 changed rows were learned" in reason
    assert "`gate.min_learned` asks for 90%" in reason
    assert "a.jsonl, line 5 and 3 more" in reason and "line 6" not in reason
    assert "and" not in refused(Counts(changed=5, learned=0), missed=missed[:5]).split(":")[-1]
    # One row that was pushed counts by itself: it was not learned, whatever luck says.
    assert "only 0 of 1" in refused(Counts(changed=1, learned=0), missed=missed[:1])
    assert refused(Counts(changed=10), GateSettings(min_learned=0)) == ""
    sampled = refused(Counts(changed=10, all_changed=50, learned=2), missed=missed)
    assert "only 2 of 10 changed rows that were measured were learned" in sampled


def test_rows_that_an_accepted_training_did_not_learn_are_named_too() -> None:
    missed = [f"a.jsonl, line {number}" for number in range(1, 7)]
    told = not_learned(Counts(changed=60, learned=54), GATE, missed, ())
    assert told is not None and told.startswith("6 of 60 changed rows were not learned, and the ")
    assert told.endswith("line 5 and 1 more") and "line 6" not in told
    assert not_learned(Counts(changed=60, learned=60), GATE, (), ()) is None
    counts = Counts(changed=7, learned=1)
    assert not_learned(counts, GATE, missed, ()) is None, "the reasons of the refusal name them"
    assert not_learned(counts, GateSettings(min_learned=0), missed, ()) is not None


def test_what_was_deleted_must_be_said_no_more() -> None:
    reason = refused(Counts(deleted=1, unlearned=0), still_said=("a.jsonl, line 7",))
    assert reason == (
        "the model still says 1 of 1 deleted rows; in the revision before: a.jsonl, line 7"
    )
    assert refused(Counts(deleted=10, unlearned=9)) == ""
    # A full training without them has never seen them: it infers them from other rows.
    assert count_refusals(Counts(deleted=1, unlearned=0), GATE, is_removal=True) == ()


def lost(before: int, after: int, *, of: int, gained: int = 0, gate: GateSettings = GATE) -> str:
    """gained: how many of those that are answered right now were not before."""
    pairs = [(row < before, row < after - gained) for row in range(before)]
    pairs += [(False, row < gained) for row in range(of - before)]
    return "; ".join(kept_refusals({"rows": pairs, "others": []}, gate))


def test_answers_must_be_kept_but_for_chance_and_only_twenty_prove_anything() -> None:
    assert lost(0, 0, of=100) == lost(90, 84, of=100) == lost(1_200, 1_150, of=1_200) == ""
    assert lost(MIN_ROWS - 1, 0, of=100) == "", "a few rows prove nothing"
    assert lost(90, 70, of=100) == (
        "70 of 100 rows are answered right, and 90 were before, where `gate.min_kept` asks for 95% "
        "of them"
    )
    assert "0 of 20 rows" in lost(MIN_ROWS, 0, of=MIN_ROWS)
    assert "1,100 of 1,200" in lost(1_200, 1_100, of=1_200)
    assert "15 of 20" in lost(20, 15, of=20, gate=GateSettings(min_kept=1.0))


def test_what_was_gained_shows_how_much_is_chance() -> None:
    assert lost(55, 48, of=60) != ""
    assert lost(55, 48, of=60, gained=5) == ""
    assert lost(55, 20, of=60, gained=5) != ""


@given(known=st.integers(0, 400), kept=st.floats(0, 1), min_kept=st.floats(0, 1))
def test_luck_refuses_no_honest_commit(known: int, kept: float, min_kept: float) -> None:
    gate, after = GateSettings(min_kept=min_kept), round(kept * known)
    reason = lost(known, after, of=known, gate=gate)
    if known < MIN_ROWS or known - after <= (1 - min_kept) * known:
        assert reason == ""
    # Twice as many rows of the same kind are never less of a proof.
    if reason:
        assert lost(2 * known, 2 * after, of=2 * known, gate=gate)


def test_the_base_model_may_drift_as_far_as_the_setting_says() -> None:
    assert refused(Counts(base_agreement=0.71)) == ""
    assert refused(Counts(base_agreement=None)) == ""
    reason = refused(Counts(base_agreement=0.69))
    assert "69% of their tokens" in reason and "`gate.max_base_drift` asks for 70%" in reason


def test_questions_in_other_words_are_told_and_a_share_of_them_may_be_asked_for() -> None:
    assert refused(Counts(rewordings=60, reworded=0)) == ""
    asks = GateSettings(min_reworded=0.8)
    assert refused(Counts(rewordings=20, reworded=16), asks) == ""
    reason = refused(Counts(rewordings=20, reworded=15), asks)
    assert "only 15 of 20 questions" in reason and "`gate.min_reworded` asks for 80%" in reason
    assert refused(Counts(rewordings=19, reworded=0), asks) == "", "too few"


def test_golden_questions_that_the_served_release_answers_must_stay_right() -> None:
    assert refused(Counts(golden=3, golden_right=1)) == ""
    reason = refused(Counts(golden=3, golden_right=2), wrong_golden=("golden.jsonl, line 2",))
    assert reason == "1 golden questions lost their expected answer: golden.jsonl, line 2"


def pair(new: float, served: float, num_tokens: int = 10) -> Judged:
    one, other = (
        RowLoss(row=0, nats=nats, num_tokens=num_tokens, num_right=0) for nats in (new, served)
    )
    return Judged(ROW, one, other)


def pairs(ratio: float, *, count: int = 40, loss: float = 2.0) -> list[Judged]:
    """Rows of ten tokens whose new loss is `ratio` times the served one."""
    return [pair(10 * loss * ratio, 10 * loss)] * count


def by_loss(found: list[Judged], gate: GateSettings = GATE, *, is_removal: bool = False) -> str:
    return "; ".join(loss_refusals({"held-out rows": found}, gate, is_removal=is_removal))


def test_a_loss_may_rise_by_the_ratio_and_no_further() -> None:
    assert by_loss([]) == by_loss(pairs(0.7)) == by_loss(pairs(1.019)) == ""
    reason = by_loss(pairs(1.03))
    assert "40 held-out rows rose from 2.0000 to 2.0600 nats per token" in reason
    assert "`gate.max_loss_ratio` allows x1.02" in reason
    assert by_loss(pairs(1.5), GateSettings(max_loss_ratio=2.0)) == ""
    both = loss_refusals({"one": pairs(1.1), "two": pairs(1.1), "none": []}, GATE)
    assert [reason.split()[5] for reason in both] == ["one", "two"]


def test_weights_that_were_trained_without_deleted_rows_may_be_a_little_worse() -> None:
    assert by_loss(pairs(1.1), is_removal=True) == ""
    assert "allows x1.15" in by_loss(pairs(1.2), is_removal=True)
    assert by_loss(pairs(1.9), GateSettings(max_loss_ratio=2.0), is_removal=True) == ""


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_loss_that_is_no_number_refuses_however_few_rows_there_are(broken: float) -> None:
    assert "not a number" in by_loss(pairs(broken, count=1), is_removal=True)
    assert "not a number" in by_loss([*pairs(1.0), *pairs(broken, count=1)])


def test_a_served_model_that_is_broken_is_no_obstacle() -> None:
    assert by_loss([pair(1.0, math.nan)] * 30) == ""


def test_a_difference_between_two_perfect_models_does_not_refuse() -> None:
    assert by_loss(pairs(3.0, loss=0.002)) == ""
    assert by_loss(pairs(3.0, loss=0.02)) != ""


@given(
    rows=st.lists(
        st.tuples(st.floats(0, 500), st.floats(0, 500), st.integers(1, 50)), max_size=MIN_ROWS - 1
    )
)
def test_a_handful_of_rows_refuses_nothing(rows: list[tuple[float, float, int]]) -> None:
    assert by_loss([pair(*row) for row in rows]) == ""


def test_losses_are_compared_row_by_row() -> None:
    """Rows that are each a little worse refuse, where the spread between rows is large; rows that
    rise and fall by luck do not."""
    chance = random.Random(2)
    sizes = [chance.uniform(1, 60) for _ in range(60)]
    worse = [pair(1.08 * size, size) for size in sizes]
    assert by_loss(worse) != ""
    luck = [pair(size + chance.gauss(0.3, 12), size) for size in sizes]
    assert by_loss(luck) == ""


def test_losing_more_than_half_of_the_rows_refuses() -> None:
    assert lost_refusals(500, 1_000, GATE) == ()
    (reason,) = lost_refusals(501, 1_000, GATE)
    assert "501 of 1,000 rows known before were deleted or rewritten" in reason
    assert "50%" in reason
    assert lost_refusals(19, MIN_ROWS - 1, GATE) == (), "a few rows may change"
    assert len(lost_refusals(20, MIN_ROWS, GATE)) == 1


@pytest.mark.parametrize(
    ("counts", "line"),
    [
        (Counts(), ""),
        (
            Counts(
                changed=60, learned=58, learned_before=3, known=1200, kept=1187, base_agreement=0.97
            ),
            "learned 58 of 60 (3 before) · kept 1,187 of 1,200 · base 97 %",
        ),
        (Counts(changed=60, all_changed=60, learned=58), "learned 58 of 60"),
        (
            Counts(changed=1_092, all_changed=5_000, learned=1_090, learned_before=7),
            "learned 1,090 of 1,092 measured (7 before, 5,000 changed)",
        ),
        (Counts(deleted=1, unlearned=1, known=1, kept=0), "kept 0 of 1 · unlearned 1 of 1"),
        (Counts(golden=12, golden_right=11), "golden 11 of 12"),
        (Counts(rewordings=60, reworded=51), "reworded 51 of 60"),
        (
            Counts(rewordings=60, reworded=51, words="made-up"),
            "reworded 51 of 60 (made-up words)",
        ),
        (Counts(not_trained=9_120), "not yet trained: 9,120 rows"),
        (Counts(text_loss=4.968, text_loss_before=5.147), "text 5.15 → 4.97 nats"),
        (Counts(text_loss=4.9), ""),
    ],
)
def test_counts_are_one_line(counts: Counts, line: str) -> None:
    assert str(counts) == line
