"""A delta on text keeps as much of what it learned as is good for all rows that are measured."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from pipeline.retrain.averaging import average
from pipeline.retrain.checkpoint import Checkpoint, copy_weights, set_weights
from pipeline.retrain.job import MetricsWriter, read_metrics
from pipeline.retrain.loss import mean_loss, row_losses
from pipeline.retrain.lowrank import low_rank
from pipeline.retrain.plan import TrainingPlan
from pipeline.retrain.settings import TrainSettings
from pipeline.retrain.tokens import TokenSequence
from pipeline.retrain.train import train
from tests.training_fixtures import make_model, one_thread, plan_of, rows

__all__ = ["one_thread"]

NAME = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """Weights that fit the rows."""
    torch.set_num_threads(1)
    model = make_model()
    plan = plan_of(rows(60), learning_rate=1e-2, tokens_per_step=128)
    folder = tmp_path_factory.mktemp("learned")
    metrics = MetricsWriter(folder / "metrics.jsonl")
    train(model, plan, TrainSettings(), job_dir=folder, metrics=metrics)
    return copy_weights(model)


def moved(weights: dict[str, Tensor], by: float) -> dict[str, Tensor]:
    """Away from where they fit, the one way or the other."""
    torch.manual_seed(1)
    return {name: tensor + by * torch.randn(tensor.shape) for name, tensor in weights.items()}


def measure(model: LlamaForCausalLM) -> Callable[[], float]:
    return lambda: mean_loss(row_losses(model, rows(8)))


def loss_of(weights: dict[str, Tensor]) -> float:
    model = make_model()
    set_weights(model, weights)
    return measure(model)()


def test_half_way_between_two_that_went_too_far_is_best(learned: dict[str, Tensor]) -> None:
    start, trained = moved(learned, 0.3), moved(learned, -0.3)
    model = make_model()
    share, loss = average(model, start, trained, measure(model), least=0.3)
    assert 0.3 < share < 0.7
    assert loss < 0.9 * min(loss_of(start), loss_of(trained))
    kept = copy_weights(model)
    assert loss == pytest.approx(loss_of(kept), rel=1e-5)
    for name in kept:
        expected = start[name] + share * (trained[name] - start[name])
        torch.testing.assert_close(kept[name], expected)


def test_there_is_a_least_share(learned: dict[str, Tensor]) -> None:
    model = make_model()
    share, _ = average(model, moved(learned, 0.1), moved(learned, 1.0), measure(model), least=0.55)
    assert share == 0.55


def test_what_is_better_alone_stays_as_it_is(learned: dict[str, Tensor]) -> None:
    model = make_model()
    share, _ = average(model, moved(learned, 0.3), learned, measure(model), least=0.5)
    assert share == 1.0
    assert all(torch.equal(learned[name], tensor) for name, tensor in copy_weights(model).items())


def test_what_training_left_alone_stays_the_same_to_the_bit(learned: dict[str, Tensor]) -> None:
    model = make_model()
    trained = moved(learned, 0.3) | {NAME: learned[NAME]}
    share, _ = average(model, learned, trained, measure(model), least=0.5)
    assert share < 1
    assert torch.equal(copy_weights(model)[NAME], learned[NAME])


@pytest.mark.parametrize("lowest", [0.55, 0.7, 0.83, 0.99])
def test_the_lowest_point_is_found_in_four_measurements(
    learned: dict[str, Tensor], lowest: float
) -> None:
    start, trained = learned, moved(learned, 0.3)
    model = make_model()
    measured = []

    def distance() -> float:
        reached = (copy_weights(model)[NAME] - start[NAME]) / (trained[NAME] - start[NAME])
        measured.append(float(reached.median()))
        return (measured[-1] - lowest) ** 2

    share, _ = average(model, start, trained, distance, least=0.5)
    assert share == pytest.approx(lowest, abs=1e-3)
    assert len(measured) == 4


def test_weights_that_are_no_numbers_are_not_hidden(learned: dict[str, Tensor]) -> None:
    model = make_model()
    measure(model)()  # how it computes is looked at once, while its weights are whole
    broken = learned | {NAME: torch.full_like(learned[NAME], torch.nan)}
    share, loss = average(model, learned, broken, measure(model), least=0.5)
    assert share == 1.0 and loss != loss
    assert copy_weights(model)[NAME].isnan().all()


def backwards(row: TokenSequence) -> TokenSequence:
    return TokenSequence(row.token_ids[::-1], row.learned, row.row)


Groups = Sequence[tuple[Sequence[TokenSequence], int]]


def contradicting(measured: Groups, least: float = 0.5) -> TrainingPlan:
    """Rows that say the opposite of those known, with large steps."""
    return plan_of(
        [backwards(row) for row in rows(4)],
        averaged=measured,
        learning_rate=0.05,
        max_tokens=600,
        min_trained_share=least,
        tokens_per_step=128,
    )


def both_kinds() -> Groups:
    return [([backwards(row) for row in rows(6)[4:]], 1), (rows(64)[50:], 1)]


def delta(
    folder: Path, plan: TrainingPlan, start: dict[str, Tensor], rank: int = 0, **settings: Any
) -> tuple[Checkpoint, dict[str, Tensor]]:
    """One that goes on from `start`."""
    folder.mkdir(exist_ok=True)
    model = make_model()
    set_weights(model, start)
    metrics = MetricsWriter(folder / "metrics.jsonl")
    told = TrainSettings.model_validate(settings)
    with low_rank(model, plan, rank):
        done = train(model, plan, told, job_dir=folder, metrics=metrics)
    return done, copy_weights(model)


def shares(folder: Path) -> list[float]:
    """The share of the new weights in each average that was made."""
    found, _ = read_metrics(folder / "metrics.jsonl")
    return [each.share for each in found if each.event == "average" and each.share is not None]


def same(weights: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    return all(torch.equal(others[name], tensor) for name, tensor in weights.items())


def test_a_delta_is_averaged_where_both_kinds_of_rows_have_a_say(
    tmp_path: Path, learned: dict[str, Tensor]
) -> None:
    done, weights = delta(tmp_path / "both", contradicting(both_kinds()), learned)
    (share,) = shares(tmp_path / "both")
    assert share < 1
    again = delta(tmp_path / "both", contradicting(both_kinds()), learned)
    assert again[0] == done and same(again[1], weights), "a job that begins again"
    known = contradicting(both_kinds()[1:])
    delta(tmp_path / "one", known, learned)
    assert shares(tmp_path / "one") == []


def test_one_that_was_killed_behind_its_best_weights_is_averaged_alike(
    tmp_path: Path, learned: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = contradicting(both_kinds())
    whole, weights = delta(tmp_path / "whole", plan, learned, checkpoint_seconds=1e-9)

    def killed(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("pipeline.retrain.train.average", killed)
        with pytest.raises(KeyboardInterrupt):
            delta(tmp_path / "killed", plan, learned, checkpoint_seconds=1e-9)
    resumed, others = delta(tmp_path / "killed", plan, learned, checkpoint_seconds=1e-9)
    assert resumed == whole
    (share,) = shares(tmp_path / "whole")
    assert shares(tmp_path / "killed") == [share] and share < 1
    assert same(others, weights)


def test_of_low_rank_matrices_the_product_is_averaged(
    tmp_path: Path, learned: dict[str, Tensor]
) -> None:
    _, weights = delta(tmp_path / "half", contradicting(both_kinds()), learned, rank=4)
    (share,) = shares(tmp_path / "half")
    assert share < 1
    alone = contradicting(both_kinds(), least=1.0)
    _, trained = delta(tmp_path / "alone", alone, learned, rank=4)
    for name, tensor in weights.items():
        expected = torch.lerp(learned[name], trained[name], share)
        torch.testing.assert_close(tensor, expected, rtol=1e-4, atol=1e-5)
