"""Several processes share out a step: together they compute the gradient of one process."""

import pytest
import torch

from pipeline.retrain import loss
from pipeline.retrain import train as loop
from pipeline.retrain.loss import AnchorTarget
from pipeline.retrain.plan import TrainingPlan
from pipeline.retrain.settings import TrainSettings
from pipeline.retrain.tokens import TokenSequence
from tests.training_fixtures import VOCABULARY, make_model, one_thread, plan_of, questions, rows

__all__ = ["one_thread"]


def anchor(sequence: TokenSequence) -> AnchorTarget:
    """An answer that the base model finds as likely as all others."""
    ids = torch.arange(8).repeat(sequence.num_learned, 1)
    return AnchorTarget(sequence, ids, torch.full(ids.shape, 1 / VOCABULARY).log())


def gradient(
    monkeypatch: pytest.MonkeyPatch, plan: TrainingPlan, visited: int, rank: int, count: int
) -> torch.Tensor:
    """What process `rank` of `count` adds to the gradient of the first step."""
    model = make_model()
    gradients = []

    def step(optimizer: torch.optim.Optimizer) -> None:
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        gradients.append(
            torch.cat(
                [
                    torch.zeros(each.numel()) if each.grad is None else each.grad.flatten().clone()
                    for each in parameters
                ]
            )
        )

    settings = TrainSettings(max_grad_norm=1e9, micro_batch_tokens=64)
    progress = loop.TrainingState(streak=[0] * len(plan.sequences), due=[0] * len(plan.sequences))
    with monkeypatch.context() as patched:
        patched.setattr(loop, "rank", lambda: rank)
        for module in (loop, loss):
            patched.setattr(module, "world_size", lambda: count)
        patched.setattr(loop, "add_up", lambda model, numbers: numbers)
        patched.setattr(torch.optim.AdamW, "step", step)
        loop._step(
            model,
            loop._optimizer(model, settings),
            plan,
            [[index] for index in range(visited)],
            1e-3,
            progress,
            settings,
        )
    return gradients[0]


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("visited", [1, 4])
@pytest.mark.parametrize("anchored", [0, 1, 4])
@pytest.mark.parametrize("deleted", [0, 2])
def test_processes_add_up_to_the_gradient_of_one(
    monkeypatch: pytest.MonkeyPatch, count: int, visited: int, anchored: int, deleted: int
) -> None:
    """Anchors of any length too, and processes for which nothing is left."""
    plan = plan_of(
        rows(visited, 6),
        unlearned=questions(deleted),
        anchors=tuple(anchor(rows(1, length)[0]) for length in range(5, 5 + anchored)),
        anchor_ratio=9.0 if anchored else 0.0,
    )
    whole = gradient(monkeypatch, plan, visited, 0, 1)
    shares = [gradient(monkeypatch, plan, visited, rank, count) for rank in range(count)]
    assert torch.allclose(sum(shares, torch.zeros(())), whole, atol=1e-6)
    assert whole.abs().max() > 1e-3
