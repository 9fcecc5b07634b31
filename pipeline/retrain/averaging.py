"""Averages the weights after a delta with the weights before it.

A delta is a training of the served weights on the changed rows. It learns these rows, but forgets
other rows a little. An average keeps most of what was learned, and brings back most of what was
forgotten.

Robust fine-tuning of zero-shot models, Wortsman et al. 2022, https://arxiv.org/abs/2109.01903
"""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pipeline.retrain import checkpoint as checkpoints

Weights = Mapping[str, Tensor]


def average(
    model: PreTrainedModel,
    start: Weights,
    trained: Weights,
    measure: Callable[[], float],
    *,
    least: float,
) -> tuple[float, float]:
    """Set `model` to the average with the smallest loss.

    A measurement takes long, so there are four at most. Three shares of the trained weights are
    measured: all, `least`, and the one in the middle. The fourth share is where the parabola
    through these three losses is lowest. If the loss of the trained weights is not a finite number,
    they are kept, so that the gate finds the fault.

    measure: returns the loss of `model` with its current weights. least: the smallest share of the
    trained weights to try, above 0. Returns the share of the trained weights, and the loss.
    """

    def loss_of(share: float) -> float:
        checkpoints.set_weights(model, _between(start, trained, share))
        return measure()

    loss = loss_of(1.0)
    if not math.isfinite(loss):
        return 1.0, loss
    middle = (1 + least) / 2
    losses = {1.0: loss, middle: loss_of(middle), least: loss_of(least)}
    lowest = _lowest_point(middle, 1 - middle, losses[least], losses[middle], loss)
    if lowest is not None and least < lowest < 1:
        losses[lowest] = loss_of(lowest)
    best = min(losses, key=lambda share: (not math.isfinite(losses[share]), losses[share]))
    checkpoints.set_weights(model, _between(start, trained, best))
    return best, losses[best]


def _lowest_point(
    middle: float, distance: float, before: float, at: float, behind: float
) -> float | None:
    """Where the parabola is lowest that has the value `at` in the middle, and `before` and `behind`
    at `distance` from it. None if the parabola has no lowest point."""
    bend = before - 2 * at + behind
    return middle + distance * (before - behind) / (2 * bend) if bend > 0 else None


def _between(start: Weights, trained: Weights, share: float) -> dict[str, Tensor]:
    return {
        name: torch.lerp(start[name], tensor, share)
        if share < 1 and tensor.is_floating_point()
        else tensor
        for name, tensor in trained.items()
    }
