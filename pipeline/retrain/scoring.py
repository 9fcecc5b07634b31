"""Forward passes: what a model makes of token sequences. Trains nothing, writes nothing."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pipeline.retrain.errors import BaseModelError
from pipeline.retrain.loss import label_logprobs
from pipeline.retrain.packing import Batch, batch, block_length, pack
from pipeline.retrain.tokens import Sequence as TokenSequence

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SCALED_HEADS = ("final_logit_softcapping", "logit_scale", "logits_scaling")
BATCH_TOKENS = 4_096


def check_head(model: "PreTrainedModel") -> None:
    """Raise BaseModelError unless logits are one matrix product of the last hidden states."""
    head = model.get_output_embeddings()
    scaled = [name for name in SCALED_HEADS if getattr(model.config, name, None) not in (None, 1.0)]
    if type(head) is not torch.nn.Linear or head.bias is not None or scaled:
        raise BaseModelError(
            f"a {type(model).__name__} cannot be trained here: its output layer is more than one "
            f"matrix ({', '.join(scaled) or head!r}); take another base model"
        )


def autocast(device: torch.device) -> AbstractContextManager[object]:
    """bfloat16 on a GPU; a CPU computes in the weights' own dtype."""
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()


def predict(model: "PreTrainedModel", part: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states at the positions that predict a learned token (N, H), the output layer's weight
    (V, H), and these tokens (N,)."""
    device = model.device
    output = model.base_model(
        input_ids=part.token_ids.to(device),
        position_ids=part.position_ids.to(device),
        use_cache=False,
    )
    labels = part.labels.to(device)
    wanted = labels >= 0
    hidden = output.last_hidden_state[wanted]
    return hidden, model.get_output_embeddings().weight.to(hidden.dtype), labels[wanted]


@dataclass(frozen=True, kw_only=True, slots=True)
class RowLoss:
    row: int
    """Index of the row, as in `Sequence.row`."""
    nats: float
    """-log p of all its learned tokens together."""
    num_tokens: int
    """Learned ones."""


@torch.no_grad()
def row_losses(model: "PreTrainedModel", sequences: Sequence[TokenSequence]) -> list[RowLoss]:
    """The loss of each row, its pieces added up, ordered by row."""
    if not sequences:
        return []
    was_training = model.training
    model.eval()
    length = block_length(sequences)
    blocks = pack([len(sequence.token_ids) for sequence in sequences], length)
    at_once = max(1, BATCH_TOKENS // length)
    nats: dict[int, float] = {}
    counts: dict[int, int] = {}
    for start in range(0, len(blocks), at_once):
        chosen = blocks[start : start + at_once]
        with autocast(model.device):
            logprobs = label_logprobs(*predict(model, batch(sequences, chosen))).double().cpu()
        order = [sequences[index] for block in chosen for index in block]
        parts = torch.split(logprobs, [sequence.num_learned for sequence in order])
        for sequence, part in zip(order, parts, strict=True):
            nats[sequence.row] = nats.get(sequence.row, 0.0) - float(part.sum())
            counts[sequence.row] = counts.get(sequence.row, 0) + sequence.num_learned
    model.train(was_training)
    return [RowLoss(row=row, nats=nats[row], num_tokens=counts[row]) for row in sorted(nats)]


def mean_loss(losses: Sequence[RowLoss]) -> float:
    """Nats per learned token over all rows; NaN for no rows."""
    num_tokens = sum(loss.num_tokens for loss in losses)
    return sum(loss.nats for loss in losses) / num_tokens if num_tokens else float("nan")
