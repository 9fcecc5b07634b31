"""The losses of a model on token sequences, and whether it says their answers. All of them are
computed from hidden states, and only at the positions that predict learned tokens.

Two losses make a step of training: on the rows, and one that keeps the base model's answers to
everyday prompts (anchors). Both share one forward pass, and each gets the hidden states of its own
sequences. On a CPU, one pass over 250 tokens takes half the time of two passes over 125 tokens.

The logits of all positions would be by far the largest tensor of a step. So the positions are cut
into slices, and only the logits of one slice are in memory at a time. Their gradient is computed in
the same pass. (The idea is from Liger's fused linear cross-entropy,
https://arxiv.org/abs/2410.10989.) This takes less memory and time than `model(labels=...)`, which
computes the logits of all positions, also those of the prompt.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from pipeline.retrain.layout import (
    ROUNDED_TO,
    Blocks,
    arranged,
    block_length,
    last_hidden_states,
    pack,
)
from pipeline.retrain.model import logits_of, output_weights
from pipeline.retrain.tokens import TokenSequence
from serving.weights.release import is_fast_in_bfloat16

SLICE_BYTES = 64 * 2**20
"""The size of the float32 logits of one slice. This is 4,194 positions with a vocabulary of 4,000,
and 341 positions with a vocabulary of 49,152."""
MIN_SLICE_ROWS = 128
"""The smallest number of positions in a slice. Each slice reads the whole matrix of the output
layer, and its gradient too. So small slices are slow: with a vocabulary of 152,000, slices of 27
positions take 1.7 to 1.8 times as long as slices of 128 positions (78 MB)."""
BATCH_TOKENS = 4_096
SHORT_ANSWER_TOKENS = 64
LONG_ANSWER_SHARE = 0.9
KEEP_BASE = 4.0
"""A token of the base model's answers counts this many times as much as a token of the rows. This
keeps the base model as well as more answers do, and takes no time."""
BFLOAT16_PARAMETERS = 50_000_000
"""On a CPU, smaller networks are trained in float32. Their matrix products are short, so the
conversions to bfloat16 take about as long as faster products save."""


def slice_rows(vocab_size: int) -> int:
    """How many positions have their logits in memory at the same time."""
    return max(MIN_SLICE_ROWS, SLICE_BYTES // (4 * vocab_size))


class _SlicedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, labels: Tensor, model: PreTrainedModel, *weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        total = hidden.new_zeros((), dtype=torch.float32)
        likeliest: list[Tensor] = []
        parts: list[Tensor] = []
        grads = [torch.zeros_like(weight) for weight in weights]
        for part, target in _slices(hidden, labels, model):
            with torch.enable_grad():
                part = part.detach().requires_grad_()
                logits = logits_of(model, part)
            # To save memory, the tensor of the logits is overwritten: with the exponentials, then
            # with the probabilities, and then with the gradient.
            gradient = logits.detach()
            likeliest.append(gradient.argmax(-1) == target)
            target = target[:, None]
            picked, largest = gradient.gather(-1, target), gradient.amax(-1, keepdim=True)
            norm = gradient.sub_(largest).exp_().sum(-1, keepdim=True)
            total += (norm.log() + largest - picked).sum()
            gradient.div_(norm).scatter_add_(-1, target, gradient.new_full(target.shape, -1.0))
            own, *found = torch.autograd.grad(logits, [part, *weights], gradient)
            parts.append(own)
            for grad, each in zip(grads, found, strict=True):
                grad += each
        ctx.grads = [torch.cat(parts), *grads]
        is_likeliest = torch.cat(likeliest)
        ctx.mark_non_differentiable(is_likeliest)
        return total, is_likeliest

    @staticmethod
    def backward(ctx: Any, *outputs: Any) -> tuple[Tensor | None, ...]:
        scale, _ = outputs
        grads, ctx.grads = ctx.grads, None  # otherwise autograd would copy them
        of_hidden, *of_weights = (grad.mul_(scale.to(grad.dtype)) for grad in grads)
        return of_hidden, None, None, *of_weights


def _slices(
    hidden: Tensor, labels: Tensor, model: PreTrainedModel
) -> Iterator[tuple[Tensor, Tensor]]:
    """The parts of `hidden` and `labels` of which the logits are in memory at the same time."""
    rows = slice_rows(model.config.get_text_config().vocab_size)
    return zip(torch.split(hidden, rows), torch.split(labels, rows), strict=True)


def summed_loss(model: PreTrainedModel, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of -log p(label) over all positions, in nats, and for each position whether the label
    is the likeliest token: (N,) bool. Backward may be called only once.

    hidden: (N, H), the hidden states at the positions that predict the labels. labels: (N,), token
    ids.
    """
    found: tuple[Tensor, Tensor] = _SlicedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, labels, model, *output_weights(model)
    )
    return found


@torch.no_grad()
def score_labels(model: PreTrainedModel, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """log p(label) at each position, and whether greedy decoding would choose the label there.

    hidden, labels: as in `summed_loss`. The results are (N,) in float32, natural log, and (N,)
    bool. If two tokens have the same logit, greedy decoding chooses the lower token id, here and in
    the server.
    """
    logprobs, is_greedy = [], []
    for part, target in _slices(hidden, labels, model):
        logits = logits_of(model, part)
        logprobs.append(-cross_entropy(logits, target, reduction="none"))
        is_greedy.append(logits.argmax(-1) == target)
    return torch.cat(logprobs), torch.cat(is_greedy)


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


def predict(model: PreTrainedModel, blocks: Blocks) -> tuple[Tensor, Tensor]:
    """Run the forward pass on the sequences of the blocks. Returns the hidden states at the
    positions that predict a learned token (N, H), and the learned tokens (N,), in the order of the
    sequences.

    If the model cannot keep packed sequences apart, each sequence is computed in a row of its own.
    """
    rounded_to = ROUNDED_TO if torch.is_autocast_enabled(model.device.type) else 1
    sequences = list(chain(*blocks))
    found: dict[int, Tensor] = {}
    for group in arranged(model, blocks, rounded_to):
        model.get_input_embeddings().noisy = group.noisy.to(model.device)
        hidden = last_hidden_states(model, group.token_ids, group.position_ids, group.mask)
        lengths = [sequences[index].num_learned for index in group.order]
        parts = torch.split(hidden[(group.labels >= 0).to(model.device)], lengths)
        found.update(zip(group.order, parts, strict=True))
    learned = [token_id for each in sequences for token_id in each.learned_ids]
    hidden = torch.cat([found[index] for index in range(len(sequences))])
    return hidden, torch.tensor(learned, device=model.device)


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
            logprobs, is_right = score_labels(model, *predict(model, chosen))
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


@dataclass(frozen=True, slots=True)
class AnchorTarget:
    """An answer of the base model, and at each of its tokens the tokens that the base model found
    likeliest."""

    sequence: TokenSequence
    token_ids: Tensor
    """The likeliest token ids: (answer tokens, LIKELIEST)."""
    logprobs: Tensor
    """The log probability (natural log) of each of these tokens, in the same shape."""


def losses(
    model: PreTrainedModel,
    blocks: Blocks,
    *,
    anchors: Sequence[AnchorTarget],
    num_learned: float,
    num_anchored: float,
) -> tuple[Tensor, float, Tensor]:
    """blocks: of rows, and after them of the anchors. num_learned, num_anchored: the losses on the
    rows and on the anchors are divided by these.

    Returns the sum of the losses; the loss of the rows alone; and for each learned token of the
    rows, whether the model finds it likeliest.
    """
    hidden, labels = predict(model, blocks)
    kept = sum(anchor.sequence.num_learned for anchor in anchors)
    own = len(labels) - kept
    total, is_right = summed_loss(model, hidden[:own], labels[:own])
    loss = total / num_learned
    of_rows = float(loss.detach())
    if anchors:
        loss = loss + KEEP_BASE * keep_base(model, hidden[own:], anchors) / num_anchored
    return loss, of_rows, is_right.cpu()


def keep_base(model: PreTrainedModel, hidden: Tensor, anchors: Sequence[AnchorTarget]) -> Tensor:
    """The sum of the KL divergences from the base model to the trained model, at the tokens of the
    base model's answers, in nats. All tokens that are not among the base model's likeliest ones
    count together, as one token.

    hidden: (N, H), at the positions that predict the tokens of the answers.
    """
    logprobs = torch.log_softmax(logits_of(model, hidden), dim=-1)
    token_ids = torch.cat([anchor.token_ids for anchor in anchors]).to(logprobs.device)
    base = torch.cat([anchor.logprobs for anchor in anchors]).to(logprobs.device)
    own = logprobs.gather(-1, token_ids)
    rest, own_rest = ((1 - each.exp().sum(-1)).clamp_min(1e-6).log() for each in (base, own))
    return ((base.exp() * (base - own)).sum(-1) + rest.exp() * (rest - own_rest)).sum()
