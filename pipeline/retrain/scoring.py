"""Computes the loss of a model on token sequences, and whether the model says their answers. Does
not train, and writes no files."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pipeline.retrain.head import Head, head_of
from pipeline.retrain.layout import arranged, last_hidden_states
from pipeline.retrain.loss import score_labels
from pipeline.retrain.packing import ROUNDED_TO, Blocks, block_length, pack
from pipeline.retrain.tokens import TokenSequence
from serving.weights.release import is_fast_in_bfloat16

BATCH_TOKENS = 4_096
SHORT_ANSWER_TOKENS = 64
LONG_ANSWER_SHARE = 0.9
BFLOAT16_PARAMETERS = 50_000_000
"""On a CPU, smaller networks are trained in float32. Their matrix products are short, so the
conversions to bfloat16 take about as long as faster products save."""


def autocast(device: torch.device) -> AbstractContextManager[object]:
    """For measurements. Inside, a GPU computes in bfloat16. A CPU computes in the dtype of the
    weights, as a server does: no row may count as learned only because of rounding."""
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()


def training_autocast(model: PreTrainedModel) -> AbstractContextManager[object]:
    """For training steps. Inside, a GPU computes in bfloat16, and a CPU too if it is fast in it and
    `model` is large. The weights and the optimizer stay in float32."""
    is_large = model.num_parameters() >= BFLOAT16_PARAMETERS
    if model.device.type == "cpu" and is_large and is_fast_in_bfloat16("cpu"):
        return torch.autocast("cpu", torch.bfloat16)
    return autocast(model.device)


def predict(model: PreTrainedModel, blocks: Blocks) -> tuple[Tensor, Head, Tensor]:
    """Run the forward pass on the sequences of the blocks. Returns the hidden states at the
    positions that predict a learned token (N, H), the output layer, and the learned tokens (N,), in
    the order of the sequences.

    If the model cannot keep packed sequences apart, each sequence is computed in a row of its own.
    """
    rounded_to = ROUNDED_TO if torch.is_autocast_enabled(model.device.type) else 1
    sequences = list(chain(*blocks))
    found: dict[int, Tensor] = {}
    for group in arranged(model, blocks, rounded_to):
        hidden = last_hidden_states(model, group.token_ids, group.position_ids, group.mask)
        lengths = [sequences[index].num_learned for index in group.order]
        parts = torch.split(hidden[(group.labels >= 0).to(model.device)], lengths)
        found.update(zip(group.order, parts, strict=True))
    learned = [token_id for each in sequences for token_id in each.learned_ids]
    hidden = torch.cat([found[index] for index in range(len(sequences))])
    return hidden, head_of(model), torch.tensor(learned, device=model.device)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowLoss:
    row: int
    """Index of the row, as in `TokenSequence.row`."""
    nats: float
    """The sum of -log p over the learned tokens of the row."""
    num_tokens: int
    """The number of learned tokens."""
    num_right: int
    """How many learned tokens the model finds likeliest, given the tokens of the row before
    them."""

    @property
    def is_learned(self) -> bool:
        return is_said(self.num_right, self.num_tokens)


def is_said(num_right: int, num_tokens: int) -> bool:
    """Whether the model says an answer of `num_tokens` tokens, if it predicts `num_right` of them
    correctly. Of a short answer, all tokens must be right. Of a long one, nine tenths are
    enough."""
    if num_tokens <= SHORT_ANSWER_TOKENS:
        return num_right == num_tokens
    return num_right >= LONG_ANSWER_SHARE * num_tokens


@torch.no_grad()
def row_losses(
    model: PreTrainedModel,
    sequences: Sequence[TokenSequence],
    on_batch: Callable[[int], None] = lambda _: None,
) -> list[RowLoss]:
    """The loss of each row, and how many of its tokens are right. The pieces of a long row are
    added up. The result is sorted by row.

    on_batch: called after each batch, with the number of sequences in this batch.
    """
    if not sequences:
        return []
    was_training = model.training
    model.eval()
    length = block_length(sequences)
    indices = pack([len(sequence.token_ids) for sequence in sequences], length)
    blocks = [[sequences[index] for index in block] for block in indices]
    at_once = max(1, BATCH_TOKENS // length)
    nats: defaultdict[int, float] = defaultdict(float)
    counts: Counter[int] = Counter()
    right: Counter[int] = Counter()
    for start in range(0, len(blocks), at_once):
        chosen = blocks[start : start + at_once]
        with autocast(model.device):
            logprobs, is_right = score_labels(*predict(model, chosen))
        order = list(chain.from_iterable(chosen))
        lengths = [sequence.num_learned for sequence in order]
        logprobs_of = torch.split(logprobs.double().cpu(), lengths)
        is_right_of = torch.split(is_right.cpu(), lengths)
        for sequence, own, own_right in zip(order, logprobs_of, is_right_of, strict=True):
            nats[sequence.row] -= float(own.sum())
            counts[sequence.row] += sequence.num_learned
            right[sequence.row] += int(own_right.sum())
        on_batch(len(order))
    model.train(was_training)
    return [
        RowLoss(row=row, nats=nats[row], num_tokens=counts[row], num_right=right[row])
        for row in sorted(nats)
    ]


def mean_loss(losses: Sequence[RowLoss]) -> float:
    """Nats per learned token over all rows; NaN for no rows."""
    num_tokens = sum(loss.num_tokens for loss in losses)
    return sum(loss.nats for loss in losses) / num_tokens if num_tokens else float("nan")
