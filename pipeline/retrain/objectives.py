"""The losses of a step: on the rows, and two that are added to it. One keeps the base model's
answers to everyday prompts (anchors). The other one unlearns deleted rows.

All losses of a step share one forward pass, and each gets the hidden states of its own sequences.
On a CPU, one pass over 250 tokens takes half the time of two passes over 125 tokens.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from pipeline.retrain.base_answers import AnchorTarget
from pipeline.retrain.group import world_size
from pipeline.retrain.head import Head
from pipeline.retrain.loss import score_labels, summed_loss
from pipeline.retrain.scoring import is_said
from pipeline.retrain.tokens import TokenSequence


def losses(
    hidden: Tensor,
    head: Head,
    labels: Tensor,
    *,
    groups: Sequence[Sequence[TokenSequence]],
    anchors: Sequence[AnchorTarget],
    num_learned: int,
    num_anchored: int,
    is_scored: bool,
) -> tuple[Tensor, float, list[bool], Tensor | None]:
    """groups: the rows, the anchors and the deleted rows of a batch.

    Returns the sum of all losses; the loss of the rows alone; for each deleted row, whether the
    model still says it; and for each learned token of the rows, whether the model finds it
    likeliest (None if not `is_scored`).
    """
    sizes = [sum(each.num_learned for each in group) for group in groups]
    own, kept, unlearned = torch.split(hidden, sizes)
    own_labels = torch.split(labels, sizes)
    loss = summed_loss(own, head, own_labels[0]) / max(1, num_learned)
    of_rows = float(loss.detach())
    still_said: list[bool] = []
    if groups[1]:
        loss = loss + keep_base(kept, head, anchors) / num_anchored
    if groups[2]:
        beside, still_said = unlearn(unlearned, head, own_labels[2], groups[2])
        loss = loss + beside / world_size()
    is_right = None
    if is_scored:
        with torch.autocast(hidden.device.type, enabled=False):
            is_right = score_labels(own.detach(), head, own_labels[0])[1].cpu()
    return loss, of_rows, still_said, is_right


def keep_base(hidden: Tensor, head: Head, anchors: Sequence[AnchorTarget]) -> Tensor:
    """The sum of the KL divergences from the base model to the trained model, at the tokens of the
    base model's answers, in nats. All tokens that are not among the base model's likeliest ones
    count together, as one token.

    hidden: (N, H), at the positions that predict the tokens of the answers.
    """
    logprobs = torch.log_softmax(head.logits(hidden), dim=-1)
    token_ids = torch.cat([anchor.token_ids for anchor in anchors]).to(logprobs.device)
    base = torch.cat([anchor.logprobs for anchor in anchors]).to(logprobs.device)
    own = logprobs.gather(-1, token_ids)
    rest, own_rest = ((1 - each.exp().sum(-1)).clamp_min(1e-6).log() for each in (base, own))
    return ((base.exp() * (base - own)).sum(-1) + rest.exp() * (rest - own_rest)).sum()


def unlearn(
    hidden: Tensor, head: Head, labels: Tensor, deleted: Sequence[TokenSequence]
) -> tuple[Tensor, list[bool]]:
    """The loss that unlearns the answers in `deleted`, and for each answer, whether the model still
    says it.

    Only answers that the model still says count. The loss of an answer is the mean of -log(1 - p)
    over those of its tokens that the model finds likeliest. Its end token is left out.

    hidden: (N, H), at the positions that predict `labels` (N,), the tokens of the answers.

    Neural text generation with unlikelihood training, Welleck et al. 2019,
    https://arxiv.org/abs/1908.04319
    """
    logits = head.logits(hidden)
    logprobs = torch.log_softmax(logits, dim=-1).gather(-1, labels[:, None]).squeeze(-1)
    lengths = [sequence.num_learned for sequence in deleted]
    parts = zip(
        torch.split(logprobs, lengths),
        torch.split(logits.argmax(-1) == labels, lengths),
        strict=True,
    )
    losses, still_said = [hidden.new_zeros(())], []
    for logprob, is_likeliest in parts:
        still_said.append(is_said(int(is_likeliest.sum()), len(is_likeliest)))
        answer = logprob[:-1][is_likeliest[:-1]] if len(logprob) > 1 else logprob
        if still_said[-1] and len(answer):
            losses.append(-torch.log1p(-answer.exp().clamp(max=1 - 1e-6)).mean())
    return torch.stack(losses).sum() / max(1, len(losses) - 1), still_said
