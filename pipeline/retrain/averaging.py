"""A delta's weights, averaged with those that it started from: in part new rows are learned, in
part others are forgotten, and half the way costs less of the one than it saves of the other.

Robust fine-tuning of zero-shot models, Wortsman et al. 2022, https://arxiv.org/abs/2109.01903
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pipeline.retrain import checkpoint as checkpoints
from pipeline.retrain.scoring import mean_loss, row_losses
from pipeline.retrain.tokens import Sequence as TokenSequence

if TYPE_CHECKING:
    from transformers import PreTrainedModel

STEP = 0.1

Weights = Mapping[str, Tensor]


def average(
    model: "PreTrainedModel",
    start: Weights,
    trained: Weights,
    rows: Sequence[TokenSequence],
    *,
    least: float,
) -> tuple[float, float]:
    """Set `model` to the average with the least loss on `rows`, trained weights alone included.

    least: The smallest share of the trained weights to try, above 0.
    Returns their share, and the loss. Where the trained weights' own loss is no number, they stay:
    nothing is to hide that from the gate.
    """
    losses: dict[float, float] = {}
    for share in _shares(least):
        checkpoints.set_weights(model, _between(start, trained, share))
        losses[share] = mean_loss(row_losses(model, rows))
        if not math.isfinite(losses[1.0]):
            return 1.0, losses[1.0]
    best = min(losses, key=lambda share: losses[share])
    checkpoints.set_weights(model, _between(start, trained, best))
    return best, losses[best]


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
