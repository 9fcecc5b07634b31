"""Averages the weights after a delta with the weights before it.

A delta is a training of the served weights on the changed rows. It learns these rows, but forgets
other rows a little. An average keeps most of what was learned, and brings back most of what was
forgotten.

Robust fine-tuning of zero-shot models, Wortsman et al. 2022, https://arxiv.org/abs/2109.01903
"""

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pipeline.retrain import checkpoint as checkpoints

if TYPE_CHECKING:
    from transformers import PreTrainedModel

STEP = 0.1

Weights = Mapping[str, Tensor]


def average(
    model: "PreTrainedModel",
    start: Weights,
    trained: Weights,
    measure: Callable[[], float],
    *,
    least: float,
) -> tuple[float, float]:
    """Set `model` to the average with the smallest loss. The trained weights alone are tried first,
    then averages with a smaller and smaller share of them.

    The search ends when the loss rises, because it has only one minimum along this line. If the
    loss of the trained weights is not a finite number, they are kept, so that the gate finds the
    fault.

    measure: returns the loss of `model` with its current weights. least: the smallest share of the
    trained weights to try, above 0. Returns the share of the trained weights, and the loss.
    """
    best, lowest = 1.0, math.inf
    for share in _shares(least):
        checkpoints.set_weights(model, _between(start, trained, share))
        loss = measure()
        if share == 1.0 and not math.isfinite(loss):
            return share, loss
        if not loss < lowest:
            break
        best, lowest = share, loss
    checkpoints.set_weights(model, _between(start, trained, best))
    return best, lowest


def _shares(least: float) -> list[float]:
    """The shares to try: from 1 down to `least`."""
    count = math.ceil(round((1 - least) / STEP, 6))
    return [max(least, round(1 - number * STEP, 6)) for number in range(count + 1)]


def _between(start: Weights, trained: Weights, share: float) -> dict[str, Tensor]:
    return {
        name: torch.lerp(start[name], tensor, share)
        if share < 1 and tensor.is_floating_point()
        else tensor
        for name, tensor in trained.items()
    }
