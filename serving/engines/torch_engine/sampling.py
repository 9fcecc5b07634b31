"""Chooses tokens from logits, and computes logprobs. The result is that of temperature, then min-p,
top-k and top-p, as in vLLM. top-k is computed first: that is faster, and leaves the same tokens.

Random tokens are drawn for a whole batch of probability distributions, with few passes over a large
vocabulary. What is drawn for a row depends only on the row's weights and random numbers. Other rows
do not change it: no sum covers more than one row, and every sum is computed in the same order for
any batch.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from serving.engine import MIN_LOGPROB, TokenLogprob
from serving.engines.torch_engine.sequence import EngineSequence, Uniform, process_logits

_Weights = NDArray[np.float32]

_MIN_TEMPERATURE = 1e-30
"""Logits divided by this are still finite."""
_ROWS_AT_ONCE = 16
"""Rows of logprobs that are computed at once. All rows of a long prompt would take as much memory
again as their logits."""
_BLOCK = 64
_SEARCHED_AT_ONCE = 4096
"""With fewer columns, `torch.topk` on the whole row is as fast as the search by groups."""
_BELOW_ONE = 1 - 2.0**-40
"""A number times this is always less than the number, even after rounding."""


def sample(sequences: Sequence[EngineSequence], logits: Tensor) -> list[int]:
    """Choose one token for each row of `logits` [sequences, vocabulary]. `logits` does not change.
    If a sequence's `logits_processor` has a `refusal` afterwards, its token is arbitrary."""
    if not all(sequence.logits_processor.is_plain for sequence in sequences):
        logits = logits.clone()
        processors = [s.logits_processor for s in sequences]
        outputs = [s.output for s in sequences]
        process_logits(logits, processors, outputs)
    rows_by_method: dict[str, list[int]] = {"greedy": [], "top_k": [], "all": []}
    for row, sequence in enumerate(sequences):
        generation = sequence.generation
        is_top_k = 0 < generation.top_k <= _max_quick_count(logits.shape[1])
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
            draw_all = _draw_from_top_k if method == "top_k" else _draw_from_all
            drawn = draw_all(chosen, found)
        for row, token in zip(rows, drawn, strict=True):
            tokens[row] = token
    return tokens


def _draw_from_top_k(sequences: Sequence[EngineSequence], logits: Tensor) -> list[int]:
    """The same as `_draw_tokens`, but only among the `top_k` most probable tokens of each row."""
    counts = [sequence.generation.top_k for sequence in sequences]
    values, ids = largest(logits, max(counts))
    places = torch.arange(max(counts))
    values.masked_fill_(places >= places.new_tensor(counts)[:, None], -torch.inf)
    drawn = torch.tensor(_draw_tokens(sequences, values))
    found: list[int] = ids.gather(1, drawn[:, None])[:, 0].tolist()
    return found


def _draw_from_all(sequences: Sequence[EngineSequence], logits: Tensor) -> list[int]:
    """The same as `_draw_tokens`, but tokens that a large `top_k` excludes are left out. Each row
    is searched by itself, because a search in all rows would find as many tokens in each."""
    counts = [sequence.generation.top_k for sequence in sequences]
    if any(0 < count < logits.shape[1] for count in counts):
        logits = logits.clone()
        for row, count in zip(logits, counts, strict=True):
            if 0 < count < len(row):
                best = row.topk(count, sorted=False)
                row.fill_(-torch.inf)[best.indices] = best.values
    return _draw_tokens(sequences, logits)


def _draw_tokens(sequences: Sequence[EngineSequence], logits: Tensor) -> list[int]:
    generations = [sequence.generation for sequence in sequences]
    scales = [1 / max(each.temperature, _MIN_TEMPERATURE) for each in generations]
    if any(scale != 1 for scale in scales):
        logits = logits * logits.new_tensor(scales)[:, None]
    weights = torch.softmax(logits, dim=-1)
    if any(each.min_p > 0 for each in generations):
        least = weights.new_tensor([each.min_p for each in generations])
        least = least[:, None] * weights.amax(dim=-1, keepdim=True)
        weights *= torch.ge(weights, least, out=torch.empty_like(weights))
    uniforms = [sequence.uniform for sequence in sequences]
    return draw(weights, [each.top_p for each in generations], uniforms)


def _rows(logits: Tensor, rows: list[int]) -> Tensor:
    """The same as `logits[rows]`, but several times as fast."""
    return logits.index_select(0, torch.tensor(rows))


def logprobs(
    token_ids: Sequence[int], num_top: Sequence[int], logits: Tensor
) -> list[TokenLogprob]:
    """The logprob of each token in its row of `logits` [tokens, vocabulary], with those of the
    `num_top` most probable tokens of the row."""
    found: list[TokenLogprob] = []
    most = min(max(num_top, default=0), logits.shape[-1])
    for start in range(0, len(token_ids), _ROWS_AT_ONCE):
        rows = logits[start : start + _ROWS_AT_ONCE]
        chosen = torch.tensor(token_ids[start : start + len(rows)])
        whole = rows.logsumexp(dim=-1, keepdim=True)
        of_chosen = _reported_logprobs(rows.gather(1, chosen[:, None]) - whole)[:, 0].tolist()
        best, at = largest(rows, most)
        values, ids = _reported_logprobs(best - whole).tolist(), at.tolist()
        for row, (logprob, token_id) in enumerate(zip(of_chosen, chosen.tolist(), strict=True)):
            count = num_top[start + row]
            top = tuple(zip(ids[row][:count], values[row][:count], strict=True))
            found.append(TokenLogprob(token_id=token_id, logprob=logprob, top=top))
    return found


def _reported_logprobs(logprobs: Tensor) -> Tensor:
    """`reported_logprob` of each number."""
    return logprobs.nan_to_num(nan=MIN_LOGPROB).clamp_min(MIN_LOGPROB)


def _max_quick_count(num_columns: int) -> int:
    """The largest `count` for which `largest` is quick in rows of `num_columns` columns."""
    return num_columns if num_columns < _SEARCHED_AT_ONCE else num_columns // _BLOCK // 4


def largest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest values in each row of `values` [rows, columns], and their columns. Both
    are [rows, count], with the largest value first.

    The columns are divided into groups. The largest values are all in the groups with the largest
    maxima, so two small searches replace one search in the whole row.
    """
    num_rows, num_columns = values.shape
    num_groups = num_columns // _BLOCK
    if num_columns < _SEARCHED_AT_ONCE or count > _max_quick_count(num_columns):
        best = values.topk(count, dim=-1)
        return best.values, best.indices
    grouped = values[:, : num_groups * _BLOCK].view(num_rows, _BLOCK, num_groups)
    groups = grouped.amax(1).topk(count, dim=-1).indices
    steps = torch.arange(0, num_groups * _BLOCK, num_groups)
    rest = torch.arange(num_groups * _BLOCK, num_columns)
    candidates = torch.cat(
        [(groups[:, :, None] + steps).flatten(1), rest.expand(num_rows, len(rest))], dim=1
    )
    best = values.gather(1, candidates).topk(count, dim=-1)
    return best.values, candidates.gather(1, best.indices)


def draw(weights: Tensor, top_p: Sequence[float], uniforms: Sequence[Uniform]) -> list[int]:
    """Draws one column for each row of `weights` [rows, columns]. `top_p` and `uniforms` have one
    entry for each row. Weights must not be negative, and each row must have a positive weight.

    A column of the row's nucleus is drawn in proportion to its weight. The nucleus is the smallest
    set of the most probable columns that together hold `top_p` of the row's weight (Holtzman et
    al., arXiv:1904.09751). Of two equal columns, the first counts as the more probable one.

    Nothing is sorted. First a column is drawn from the whole row. It is in the nucleus if the more
    probable columns together hold less than `top_p`. Otherwise the next draw is among those columns
    only (rejection sampling as in FlashInfer, flashinfer.ai/2025/03/10/sampling.html).
    """
    sums = _block_sums(weights)
    totals = sums.sum(-1)
    chosen = _draw_by_weight(weights, sums, uniforms)
    share = torch.tensor(top_p, dtype=torch.float64)
    limits = share * totals
    # Most rows need no exact check, because one of two quick ones proves that the column is in the
    # nucleus. First check: the more probable columns weigh at most as much as all other columns.
    weight = weights.gather(1, chosen[:, None])
    left = (share < 1) & (totals - weight[:, 0] >= limits)
    if left.any():
        # Second check: they weigh at most as much as all other columns that are at least as
        # probable.
        held = _sum_of_at_least(weights, weight, left) - weight[:, 0]
        left &= held >= limits
    tokens: list[int] = chosen.tolist()
    for row in left.nonzero()[:, 0].tolist():
        of_row = weights[row].numpy(force=True)
        tokens[row] = _redraw(of_row, tokens[row], top_p[row], uniforms[row])
    return tokens


def _sum_of_at_least(weights: Tensor, bound: Tensor, wanted: Tensor) -> Tensor:
    """For each row that is `wanted`, the sum of its weights that are at least `bound`."""
    rows = wanted.nonzero()[:, 0]
    if 2 * len(rows) > len(weights):  # copying these rows would cost as much as summing all
        rows = torch.arange(len(weights))
    else:
        weights, bound = weights.index_select(0, rows), bound[rows]
    # Several times as fast as `torch.where`, because the result of `ge` has the dtype of `weights`.
    kept = torch.ge(weights, bound, out=torch.empty_like(weights)).mul_(weights)
    sums = torch.zeros(len(wanted), dtype=torch.float64)
    return sums.index_copy_(0, rows, _block_sums(kept).sum(-1))


def _redraw(weights: _Weights, chosen: int, top_p: float, uniform: Uniform) -> int:
    """A column of one row's nucleus: `chosen` if it is in the nucleus, else a more probable one.
    Each round leaves out the columns that are not more probable than the last drawn one."""
    limit = top_p * weights.sum(dtype=np.float64)
    columns = np.arange(len(weights))
    while True:
        weight = weights[chosen]
        is_above = weights > weight
        is_above[:chosen] |= weights[:chosen] == weight
        places = np.flatnonzero(is_above)
        above = weights[places]
        so_far = above.cumsum(dtype=np.float64)
        if not len(above) or so_far[-1] < limit:
            return int(columns[chosen])
        columns, weights = columns[places], above
        target = min(uniform(), _BELOW_ONE) * so_far[-1]
        chosen = int(so_far.searchsorted(target, side="right"))


def _draw_by_weight(weights: Tensor, sums: Tensor, uniforms: Sequence[Uniform]) -> Tensor:
    """Draws a column of each row in proportion to its weight.

    It is the first column at which the running sum of the weights exceeds a random share of the
    total. The block that contains the column is found first.
    """
    num_columns = weights.shape[1]
    numbers = torch.tensor([each() for each in uniforms], dtype=torch.float64)
    share = numbers.clamp_(max=_BELOW_ONE)[:, None]
    so_far = sums.cumsum(-1)
    target = share * so_far[:, -1:]
    block = (so_far <= target).sum(-1, keepdim=True)
    # Continue in the block with the rest of the share. The rest of the target cannot be used,
    # because the sum of the block's columns is rounded in another way than the block's own sum.
    in_block = sums.gather(1, block)
    share = 1 - (so_far.gather(1, block) - target) / in_block
    columns = block * _BLOCK + torch.arange(_BLOCK)
    found = weights.gather(1, columns.clamp(max=num_columns - 1)).double()
    so_far = found.masked_fill_(columns >= num_columns, 0).cumsum(-1)
    target = share.clamp_(0, _BELOW_ONE) * so_far[:, -1:]
    return block[:, 0] * _BLOCK + (so_far <= target).sum(-1)


def _block_sums(weights: Tensor) -> Tensor:
    """float64 [rows, blocks]: the sum of each `_BLOCK` columns. The last block has the rest."""
    whole = weights.shape[1] // _BLOCK * _BLOCK
    blocks = weights[:, :whole].view(len(weights), -1, _BLOCK).sum(-1)
    rest = weights[:, whole:].sum(-1, keepdim=True)
    return torch.cat([blocks, rest], dim=1).double()
