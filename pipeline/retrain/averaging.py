"""A delta's weights, averaged with those that it started from: in part new rows are learned, in
part others are forgotten, and half the way costs less of the one than it saves of the other.

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
    """Set `model` to the average of the least loss, trained weights alone included.

    From these on the loss falls, if at all, to the bottom of one valley: what lies behind is not
    measured. Where it is no number, the trained weights stay: the gate is to see that.

    measure: The loss of the model as it is then.
    least: The smallest share of the trained weights to try, above 0.
    Returns their share, and the loss.
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
    """1 first, and down to `least`."""
    count = math.ceil(round((1 - least) / STEP, 6))
    return [max(least, round(1 - number * STEP, 6)) for number in range(count + 1)]


def _between(start: Weights, trained: Weights, share: float) -> dict[str, Tensor]:
    return {
        name: torch.lerp(start[name], tensor, share)
        if share < 1 and tensor.is_floating_point()
        else tensor
        for name, tensor in trained.items()
    }
