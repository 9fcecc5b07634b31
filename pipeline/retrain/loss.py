"""Computes the cross-entropy loss from hidden states, and only at the positions that predict
learned tokens.

The logits of all positions would be by far the largest tensor of a step. So the positions are cut
into slices, and only the logits of one slice are in memory at a time. Their gradient is computed in
the same pass. (The idea is from Liger's fused linear cross-entropy,
https://arxiv.org/abs/2410.10989.) This takes less memory and time than `model(labels=...)`, which
computes the logits of all positions, also those of the prompt.
"""

from typing import Any

import torch
from torch import Tensor

from pipeline.retrain.head import Head, pad_rows

SLICE_BYTES = 64 * 2**20
"""The size of the float32 logits of one slice. This is 4,194 positions with a vocabulary of 4,000,
and 341 positions with a vocabulary of 49,152."""
MIN_SLICE_ROWS = 128
"""The smallest number of positions in a slice. Each slice reads the whole matrix of the output
layer, and its gradient too. So small slices are slow: with a vocabulary of 152,000, slices of 27
positions take 1.7 to 1.8 times as long as slices of 128 positions (78 MB)."""


def slice_rows(vocab_size: int) -> int:
    """How many positions have their logits in memory at the same time."""
    return max(MIN_SLICE_ROWS, SLICE_BYTES // (4 * vocab_size))


class _SlicedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        scale: float,
        softcap: float | None,
    ) -> Tensor:
        head = Head(weight, bias, scale, softcap).cast_for(hidden)
        hidden_dtype, hidden = hidden.dtype, hidden.to(head.weight.dtype)
        total = hidden.new_zeros((), dtype=torch.float32)
        grad_hidden = torch.empty_like(hidden)
        is_trained = ctx.needs_input_grad[1]
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if is_trained else None
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        rows = slice_rows(weight.shape[0])
        for start in range(0, hidden.shape[0], rows):
            part, target = hidden[start : start + rows], labels[start : start + rows, None]
            logits = head.logits(part)
            picked = logits.gather(-1, target)
            largest = logits.amax(-1, keepdim=True)
            slope = None if softcap is None else 1 - (logits / softcap).square_()
            # To save memory, the tensor `logits` is overwritten from here on: first with the
            # exponentials, then with the probabilities, and then with the gradient.
            norm = logits.sub_(largest).exp_().sum(-1, keepdim=True)
            total += (norm.log() + largest - picked).sum()
            gradient = logits.div_(norm)
            gradient.scatter_add_(-1, target, gradient.new_full(target.shape, -1.0))
            if slope is not None:
                gradient.mul_(slope)
            if scale != 1.0:
                gradient.mul_(scale)
            if grad_bias is not None:
                grad_bias += gradient.sum(0)
            gradient = pad_rows(gradient.to(hidden.dtype))
            grad_hidden[start : start + rows] = (gradient @ head.weight)[: len(part)]
            if grad_weight is not None and gradient.dtype == torch.float32:
                grad_weight.addmm_(gradient.t(), part)
            elif grad_weight is not None:
                grad_weight += gradient.t() @ pad_rows(part)
        ctx.grads = grad_hidden.to(hidden_dtype), grad_weight, grad_bias
        return total

    @staticmethod
    def backward(ctx: Any, *outputs: Any) -> tuple[Tensor | None, ...]:
        (scale,) = outputs
        grads, ctx.grads = ctx.grads, None  # otherwise autograd would copy them
        scaled = (None if grad is None else grad.mul_(scale.to(grad.dtype)) for grad in grads)
        return *scaled, None, None, None


def summed_loss(hidden: Tensor, head: Head, labels: Tensor) -> Tensor:
    """The sum of -log p(label) over all positions, in nats. Backward may be called only once.

    hidden: (N, H), the hidden states at the positions that predict the labels. labels: (N,), token
    ids.
    """
    total: Tensor = _SlicedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, head.weight, head.bias, labels, head.scale, head.softcap
    )
    return total


@torch.no_grad()
def score_labels(hidden: Tensor, head: Head, labels: Tensor) -> tuple[Tensor, Tensor]:
    """log p(label) at each position, and whether greedy decoding would choose the label there.

    hidden, labels: as in `summed_loss`. The results are (N,) in float32, natural log, and (N,)
    bool. If two tokens have the same logit, greedy decoding chooses the lower token id, here and in
    the server.
    """
    head = head.cast_for(hidden)
    rows = slice_rows(head.weight.shape[0])
    logprobs = [hidden.new_zeros(0, dtype=torch.float32)]
    is_greedy = [hidden.new_zeros(0, dtype=torch.bool)]
    for start in range(0, hidden.shape[0], rows):
        target = labels[start : start + rows]
        logits = head.logits(hidden[start : start + rows])
        is_greedy.append(logits.argmax(-1) == target)
        picked = logits.gather(-1, target[:, None]).squeeze(-1)
        largest = logits.amax(-1)
        norm = logits.sub_(largest[:, None]).exp_().sum(-1)
        logprobs.append(picked - largest - norm.log())
    return torch.cat(logprobs), torch.cat(is_greedy)
