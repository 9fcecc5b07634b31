"""The gate: what it refuses and what it lets through."""

from pipeline.retrain.gate import Noise, Pair, refusals_by_loss, refusals_by_rows
from pipeline.retrain.settings import GateSettings

GATE = GateSettings()


def pairs(ratio: float, *, count: int = 40, loss: float = 2.0) -> list[Pair]:
    """Rows of ten tokens whose new loss is `ratio` times the served one."""
    return [Pair(new_nats=10 * loss * ratio, served_nats=10 * loss, num_tokens=10)] * count


def test_better_and_equal_pass() -> None:
    assert refusals_by_loss(pairs(0.7), pairs(1.0), GATE) == ()


def test_each_ratio_has_its_own_bound() -> None:
    assert refusals_by_loss(pairs(1.009), pairs(1.019), GATE) == ()
    (new,) = refusals_by_loss(pairs(1.02), pairs(1.0), GATE)
    assert "40 held-out rows of the new range" in new
    assert "from 2.0000 to 2.0400" in new
    (known,) = refusals_by_loss(pairs(0.5), pairs(1.03), GATE)
    assert "known before" in known
    assert len(refusals_by_loss(pairs(1.1), pairs(1.1), GATE)) == 2


def test_weights_that_were_trained_without_deleted_rows_may_be_a_little_worse() -> None:
    assert refusals_by_loss(pairs(1.1), pairs(1.1), GATE, is_removal=True) == ()
    (one,) = refusals_by_loss(pairs(1.1), pairs(1.2), GATE, is_removal=True)
    assert "known before rose" in one and "x1.15 is allowed" in one
    (broken,) = refusals_by_loss(pairs(float("nan")), [], GATE, is_removal=True)
    assert "not a number" in broken
    # A setting that allows more anyhow stands.
    lax = GateSettings(max_old_ratio=2.0)
    assert refusals_by_loss([], pairs(1.9), lax, is_removal=True) == ()


def test_a_loss_that_is_no_number_refuses() -> None:
    for broken in (float("nan"), float("inf")):
        (reason,) = refusals_by_loss(pairs(broken), pairs(1.0), GATE)
        assert "not a number" in reason


def test_a_served_model_that_is_broken_is_no_obstacle() -> None:
    broken = [Pair(new_nats=1.0, served_nats=float("nan"), num_tokens=3)] * 9
    assert refusals_by_loss(broken, [], GATE) == ()


def test_noise_on_few_rows_does_not_refuse_but_on_many_does() -> None:
    few = [each for ratio in (0.6, 1.4, 1.5, 0.7, 1.1) for each in pairs(ratio, count=1)]
    assert refusals_by_loss([], few, GATE) == ()
    assert refusals_by_loss([], few * 100, GATE)
    assert refusals_by_loss([], few, GateSettings(sigmas=0))


def test_a_tiny_difference_between_two_perfect_models_does_not_refuse() -> None:
    assert refusals_by_loss(pairs(3.0, loss=0.002), pairs(3.0, loss=0.002), GATE) == ()
    assert refusals_by_loss(pairs(3.0, loss=0.02), [], GATE)


def test_one_new_row_is_judged_with_the_others() -> None:
    assert refusals_by_loss(pairs(1.3, count=1), pairs(0.99), GATE) == ()
    assert refusals_by_loss(pairs(9.0, count=1), pairs(1.1), GATE)


def test_nothing_measured_refuses() -> None:
    assert refusals_by_loss([], [], GATE) == ("no held-out row was measured",)


def by_rows(
    *, lost: int = 0, new: tuple[int, int] = (0, 40), known: tuple[int, int] = (0, 40)
) -> tuple[str, ...]:
    return refusals_by_rows(
        lost,
        1_000,
        Noise(noisy=new[0], rows=new[1]),
        Noise(noisy=known[0], rows=known[1]),
        GATE,
    )


def test_losing_more_than_half_of_the_rows_refuses() -> None:
    assert by_rows(lost=500) == ()
    (reason,) = by_rows(lost=501)
    assert "501 of 1000 rows known before were deleted or rewritten" in reason
    assert "50%" in reason


def test_noise_refuses_unless_there_was_as_much_before_or_too_little_to_tell() -> None:
    (reason,) = by_rows(new=(16, 40))
    assert "16 of 40 rows of the new range are noise" in reason
    assert by_rows(new=(8, 40)) == ()
    assert by_rows(new=(16, 40), known=(16, 40)) == ()
    assert by_rows(new=(3, 3)) == ()
    assert by_rows(new=(2, 5), known=(1, 5)) == ()
