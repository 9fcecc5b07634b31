"""Chooses tokens from logits, and computes logprobs. The only state is the random generator for
sequences without a seed."""

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from serving.engine import MIN_LOGPROB, TokenLogprob
from serving.engines.torch_engine.drawing import draw, largest, max_quick_count
from serving.engines.torch_engine.grammars import NextTokens
from serving.engines.torch_engine.logits_processor import process_logits
from serving.engines.torch_engine.sequence import EngineSequence

_MIN_TEMPERATURE = 1e-30
"""Logits divided by this are still finite."""
_ROWS_AT_ONCE = 16
"""Rows of logprobs that are computed at once. All rows of a long prompt would take as much memory
again as their logits."""


class Sampler:
    """Applies temperature, then min-p, top-k and top-p, in the same order as vLLM."""

    def __init__(self) -> None:
        self._unseeded = random.Random()
        self._next_tokens = NextTokens()

    def sample(self, sequences: Sequence[EngineSequence], logits: Tensor) -> list[int]:
        """Choose one token for each row of `logits` [sequences, vocabulary]. `logits` does not
        change. If a sequence's `logits_processor` has a `refusal` afterwards, its token is
        arbitrary."""
        if not all(sequence.logits_processor.is_plain for sequence in sequences):
            logits = logits.clone()
            processors = [s.logits_processor for s in sequences]
            outputs = [s.output for s in sequences]
            process_logits(logits, processors, outputs, self._next_tokens)
        rows_by_method: dict[str, list[int]] = {"greedy": [], "top_k": [], "all": []}
        for row, sequence in enumerate(sequences):
            generation = sequence.generation
            is_top_k = 0 < generation.top_k <= max_quick_count(logits.shape[1])
            method = "greedy" if generation.temperature == 0 else "top_k" if is_top_k else "all"
            rows_by_method[method].append(row)
        tokens = [0] * len(sequences)
        for method, rows in rows_by_method.items():
            if not rows:
                continue
            chosen = [sequences[row] for row in rows]
            found = logits if len(rows) == len(sequences) else _rows(logits, rows)
            if method == "greedy":
                drawn = found.argmax(dim=-1).tolist()
            else:
                draw_all = self._draw_from_top_k if method == "top_k" else self._draw_from_all
                drawn = draw_all(chosen, found)
            for row, token in zip(rows, drawn, strict=True):
                tokens[row] = token
        return tokens

    def _draw_from_top_k(self, sequences: Sequence[EngineSequence], logits: Tensor) -> list[int]:
        """The same as `_draw`, but only among the `top_k` most probable tokens of each row."""
        counts = [sequence.generation.top_k for sequence in sequences]
        values, ids = largest(logits, max(counts))
        places = torch.arange(max(counts), device=logits.device)
        values.masked_fill_(places >= places.new_tensor(counts)[:, None], -torch.inf)
        drawn = torch.tensor(self._draw(sequences, values), device=logits.device)
        found: list[int] = ids.gather(1, drawn[:, None])[:, 0].tolist()
        return found

    def _draw_from_all(self, sequences: Sequence[EngineSequence], logits: Tensor) -> list[int]:
        """The same as `_draw`, but tokens that a large `top_k` excludes are left out. Each row is
        searched by itself, because a search in all rows would find as many tokens in each."""
        counts = [sequence.generation.top_k for sequence in sequences]
        if any(0 < count < logits.shape[1] for count in counts):
            logits = logits.clone()
            for row, count in zip(logits, counts, strict=True):
                if 0 < count < len(row):
                    best = row.topk(count, sorted=False)
                    row.fill_(-torch.inf)[best.indices] = best.values
        return self._draw(sequences, logits)

    def _draw(self, sequences: Sequence[EngineSequence], logits: Tensor) -> list[int]:
        generations = [sequence.generation for sequence in sequences]
        scales = [1 / max(each.temperature, _MIN_TEMPERATURE) for each in generations]
        if any(scale != 1 for scale in scales):
            logits = logits * logits.new_tensor(scales)[:, None]
        weights = torch.softmax(logits, dim=-1)
        if any(each.min_p > 0 for each in generations):
            least = weights.new_tensor([each.min_p for each in generations])
            least = least[:, None] * weights.amax(dim=-1, keepdim=True)
            weights *= torch.ge(weights, least, out=torch.empty_like(weights))
        uniforms = [sequence.uniform or self._unseeded.random for sequence in sequences]
        return draw(weights, [each.top_p for each in generations], uniforms)


def _rows(logits: Tensor, rows: list[int]) -> Tensor:
    """The same as `logits[rows]`, but several times as fast."""
    return logits.index_select(0, torch.tensor(rows, device=logits.device))


def logprobs(
    token_ids: Sequence[int], num_top: Sequence[int], logits: Tensor
) -> list[TokenLogprob]:
    """The logprob of each token in its row of `logits` [tokens, vocabulary], with those of the
    `num_top` most probable tokens of the row."""
    found: list[TokenLogprob] = []
    most = min(max(num_top, default=0), logits.shape[-1])
    for start in range(0, len(token_ids), _ROWS_AT_ONCE):
        rows = logits[start : start + _ROWS_AT_ONCE]
        chosen = torch.tensor(token_ids[start : start + len(rows)], device=logits.device)
        whole = rows.logsumexp(dim=-1, keepdim=True)
        of_chosen = _reported(rows.gather(1, chosen[:, None]) - whole)[:, 0].tolist()
        best, at = largest(rows, most)
        values, ids = _reported(best - whole).tolist(), at.tolist()
        for row, (logprob, token_id) in enumerate(zip(of_chosen, chosen.tolist(), strict=True)):
            count = num_top[start + row]
            top = tuple(zip(ids[row][:count], values[row][:count], strict=True))
            found.append(TokenLogprob(token_id=token_id, logprob=logprob, top=top))
    return found


def _reported(logprobs: Tensor) -> Tensor:
    """`reported_logprob` of each number."""
    return logprobs.nan_to_num(nan=MIN_LOGPROB).clamp_min(MIN_LOGPROB)
