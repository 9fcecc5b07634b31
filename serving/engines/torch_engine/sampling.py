"""From logits to tokens and logprobs. It keeps no state but the generator of unseeded draws."""

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from serving.engine import TokenLogprob
from serving.engines.torch_engine.sequence import Sequence

# A whole vocabulary is sorted only where this many tokens do not hold top-p.
_LIKELY_NUCLEUS = 256


class Sampler:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._unseeded = torch.Generator(device)
        self._unseeded.seed()

    def sample(self, sequences: Seq[Sequence], logits: Tensor) -> list[int]:
        """One token per row of `logits` [sequences, vocabulary], which is left as it is."""
        greedy: list[int] = logits.argmax(dim=-1).tolist()
        if all(sequence.is_plain for sequence in sequences):
            return greedy
        tokens = list(greedy)
        drawing: list[int] = []
        shaped = logits.clone()
        for row, sequence in enumerate(sequences):
            if sequence.is_plain:
                continue
            is_changed = _shape(shaped[row], sequence)
            if sequence.generation.temperature > 0:
                drawing.append(row)
            elif is_changed:
                tokens[row] = int(shaped[row].argmax())
        if drawing:
            chosen = [sequences[row] for row in drawing]
            for row, token in zip(drawing, self._draw(chosen, shaped[drawing]), strict=True):
                tokens[row] = token
        return tokens

    def _draw(self, sequences: Seq[Sequence], logits: Tensor) -> list[int]:
        temperatures = [sequence.generation.temperature for sequence in sequences]
        logits /= torch.tensor(temperatures, device=self._device)[:, None]
        for row, sequence in enumerate(sequences):
            _truncate(logits[row], sequence)
        probabilities = torch.softmax(logits, dim=-1)
        # The largest of p / e with e exponential is a draw from p: one generator per row, and no
        # row's draw depends on which others are in the batch.
        noise = torch.empty_like(probabilities)
        for row, sequence in enumerate(sequences):
            noise[row].exponential_(generator=sequence.generator or self._unseeded)
        drawn: list[int] = probabilities.div_(noise).argmax(dim=-1).tolist()
        return drawn


def logprobs(token_ids: Seq[int], num_top: Seq[int], logits: Tensor) -> list[TokenLogprob]:
    """Of each token under its row of `logits` [tokens, vocabulary], with the best `num_top`."""
    normalised = torch.log_softmax(logits, dim=-1)
    chosen = torch.tensor(token_ids, device=logits.device)
    of_chosen: list[float] = normalised.gather(1, chosen[:, None])[:, 0].tolist()
    best = normalised.topk(min(max(num_top), normalised.shape[-1]), dim=-1)
    values, ids = best.values.tolist(), best.indices.tolist()
    return [
        TokenLogprob(
            token_id=token_id,
            logprob=of_chosen[row],
            top=tuple(zip(ids[row][: num_top[row]], values[row][: num_top[row]], strict=True)),
        )
        for row, token_id in enumerate(token_ids)
    ]


def _shape(logits: Tensor, sequence: Sequence) -> bool:
    """Bias, forbidden ends and penalties, in place, on one row; whether there were any."""
    generation = sequence.generation
    is_changed = False
    if generation.logit_bias:
        at = torch.tensor(list(generation.logit_bias), device=logits.device)
        logits[at] += torch.tensor(list(generation.logit_bias.values()), device=logits.device)
        is_changed = True
    if sequence.stop_ids and len(sequence.output) < generation.min_tokens:
        logits[torch.tensor(list(sequence.stop_ids), device=logits.device)] = -torch.inf
        is_changed = True
    if sequence.penalty is not None:
        sequence.penalty.apply(logits)
        is_changed = True
    return is_changed


def _truncate(logits: Tensor, sequence: Sequence) -> None:
    """min-p, top-k and top-p, in place, on one row whose temperature is applied."""
    generation = sequence.generation
    if generation.min_p > 0:
        floor = torch.softmax(logits, dim=-1).max() * generation.min_p
        logits.masked_fill_(torch.softmax(logits, dim=-1) < floor, -torch.inf)
    if 0 < generation.top_k < logits.shape[-1]:
        least = logits.topk(generation.top_k).values[-1]
        logits.masked_fill_(logits < least, -torch.inf)
    if generation.top_p < 1:
        kept = _nucleus(torch.softmax(logits, dim=-1), generation.top_p)
        values = logits[kept]
        logits.fill_(-torch.inf)
        logits[kept] = values


def _nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """The fewest most probable tokens that hold `top_p` together (arXiv:1904.09751)."""
    ordered, at = probabilities.topk(min(_LIKELY_NUCLEUS, len(probabilities)))
    if ordered.sum() < top_p:
        ordered, at = probabilities.sort(descending=True)
    # A token stays while those before it hold less: the first one always does.
    is_kept = ordered.cumsum(dim=-1) - ordered < top_p
    is_kept[0] = True
    return at[is_kept]
