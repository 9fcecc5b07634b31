"""Cross-entropy straight from hidden states, over the predicted positions only.

The logits of a step are by far its largest tensor. Here they exist for one slice of the positions
at a time, and their gradient is computed in the same pass (the idea of Liger's fused linear
cross-entropy, https://arxiv.org/abs/2410.10989), so that neither a masked prompt nor a large
vocabulary costs what it would in `model(labels=...)`.
"""

from typing import Any

import torch
from torch import Tensor

LOGITS_PER_SLICE = 1 << 22
"""16 MB in float32: small beside the weights, large enough for a full matrix product."""


class _SlicedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        rows = max(1, LOGITS_PER_SLICE // weight.shape[0])
        total = hidden.new_zeros((), dtype=torch.float32)
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = (
            torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        )
        for start in range(0, hidden.shape[0], rows):
            part, target = hidden[start : start + rows], labels[start : start + rows]
            logits = (part @ weight.t()).float()
            log_norm = torch.logsumexp(logits, dim=-1, keepdim=True)
            total += (log_norm.squeeze(-1) - logits.gather(-1, target[:, None]).squeeze(-1)).sum()
            if grad_hidden is None and grad_weight is None:
                continue
            gradient = logits.sub_(log_norm).exp_()
            gradient.scatter_add_(
                -1, target[:, None], gradient.new_full((target.shape[0], 1), -1.0)
            )
            gradient = gradient.to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(gradient, weight, out=grad_hidden[start : start + rows])
            if grad_weight is not None:
                grad_weight += gradient.t() @ part
        ctx.grads = (grad_hidden, grad_weight)
        return total

    @staticmethod
    def backward(ctx: Any, *outputs: Any) -> tuple[Tensor | None, Tensor | None, None]:
        (scale,) = outputs
        grad_hidden, grad_weight = ctx.grads
        return (
            None if grad_hidden is None else grad_hidden.mul_(scale.to(grad_hidden.dtype)),
            None if grad_weight is None else grad_weight.mul_(scale),
            None,
        )


def summed_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Sum of -log p(label), in nats.

    hidden: (N, H), of the positions that predict; weight: (V, H) of the output layer;
    labels: (N,) token ids. Backward may be called once.
    """
    total: Tensor = _SlicedCrossEntropy.apply(hidden, weight, labels)  # type: ignore[no-untyped-call]
    return total


@torch.no_grad()
def label_logprobs(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """log p(label) of each position: (N,), float32, natural log. Shapes as in `summed_loss`."""
    rows = max(1, LOGITS_PER_SLICE // weight.shape[0])
    parts = []
    for start in range(0, hidden.shape[0], rows):
        logits = (hidden[start : start + rows] @ weight.t()).float()
        target = labels[start : start + rows, None]
        parts.append(logits.gather(-1, target).squeeze(-1) - torch.logsumexp(logits, dim=-1))
    return torch.cat(parts) if parts else hidden.new_zeros(0, dtype=torch.float32)
