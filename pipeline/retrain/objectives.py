"""The two losses of a step that are added to the loss on the rows. One keeps the base model's
answers to everyday prompts (anchors). The other one unlearns deleted rows.

All losses of a step share one forward pass, and each gets the hidden states of its own sequences.
On a CPU, one pass over 250 tokens takes half the time of two passes over 125 tokens.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from pipeline.retrain.base_answers import AnchorTarget, divergence
from pipeline.retrain.head import Head
from pipeline.retrain.scoring import is_said
from pipeline.retrain.tokens import TokenSequence


def keep_base(hidden: Tensor, head: Head, anchors: Sequence[AnchorTarget]) -> Tensor:
    """The sum of the KL divergences from the base model to the trained model, at the tokens of the
    base model's answers.

    hidden: (N, H), at the positions that predict the tokens of the answers.
    """
    return divergence(torch.log_softmax(head.logits(hidden), dim=-1), anchors).sum()


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
