"""Draws from whole batches of distributions, in few passes over a large vocabulary.

A row's draw depends on its own weights and its own random numbers only: no sum is over more than
one row, and each is computed in the same order whatever the other rows are.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_Weights = NDArray[np.float32]
Uniform = Callable[[], float]
"""The next random number in [0, 1) of one row."""

_BLOCK = 64
_FEW = 4096
"""Columns that `torch.topk` searches as quickly as the search by groups."""
_BELOW_ONE = 1 - 2.0**-40
"""A product with it stays below the other factor, however it is rounded."""


def largest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of each row of `values` [rows, columns] and where they are, best first.

    The best of all are within the groups whose maxima are the best, so two small searches replace
    one in the whole row.
    """
    num_rows, num_columns = values.shape
    num_groups = num_columns // _BLOCK
    if num_columns < _FEW or 4 * count > num_groups:
        best = values.topk(count, dim=-1)
        return best.values, best.indices
    grouped = values[:, : num_groups * _BLOCK].view(num_rows, _BLOCK, num_groups)
    groups = grouped.amax(1).topk(count, dim=-1).indices
    steps = torch.arange(0, num_groups * _BLOCK, num_groups, device=values.device)
    rest = torch.arange(num_groups * _BLOCK, num_columns, device=values.device)
    candidates = torch.cat(
        [(groups[:, :, None] + steps).flatten(1), rest.expand(num_rows, len(rest))], dim=1
    )
    best = values.gather(1, candidates).topk(count, dim=-1)
    return best.values, candidates.gather(1, best.indices)


def draw(weights: Tensor, top_p: Seq[float], uniforms: Seq[Uniform]) -> list[int]:
    """A column of each row of `weights` [rows, columns], drawn in proportion to the weights of its
    nucleus: the fewest most probable columns that hold `top_p` of the row together (Holtzman et
    al., arXiv:1904.09751). Of equal columns the first is the more probable one.

    Nothing is sorted. A column is drawn from the whole row. If the columns that are more probable
    hold less than `top_p`, it is in the nucleus. Otherwise the draw is repeated among those columns
    only (rejection sampling as in FlashInfer, flashinfer.ai/2025/03/10/sampling.html). Weights are
    not negative, and each row has a positive one.
    """
    sums = _block_sums(weights)
    totals = sums.sum(-1)
    chosen = _pick(weights, sums, uniforms)
    share = torch.tensor(top_p, dtype=torch.float64, device=weights.device)
    limits = share * totals
    # Two quick proofs of being inside, so that few rows need the exact one. First: what is more
    # probable weighs no more than all the other columns.
    weight = weights.gather(1, chosen[:, None])
    left = (share < 1) & (totals - weight[:, 0] >= limits)
    if left.any():
        # Second: nor does it weigh more than all that is as probable or more, the column apart.
        held = _sum_from(weights, weight, left) - weight[:, 0]
        left &= held >= limits
    tokens: list[int] = chosen.tolist()
    for row in left.nonzero()[:, 0].tolist():
        of_row = weights[row].numpy(force=True)
        tokens[row] = _draw_again(of_row, tokens[row], top_p[row], uniforms[row])
    return tokens


def _sum_from(weights: Tensor, bound: Tensor, wanted: Tensor) -> Tensor:
    """Of each row that is `wanted`, the sum of the weights that reach `bound`."""
    rows = wanted.nonzero()[:, 0]
    if 2 * len(rows) > len(weights):  # to take them out would cost as much as the others
        rows = torch.arange(len(weights), device=weights.device)
    else:
        weights, bound = weights.index_select(0, rows), bound[rows]
    # Several times as quick as `torch.where`, since the comparison's result is of the same type.
    kept = torch.ge(weights, bound, out=torch.empty_like(weights)).mul_(weights)
    sums = torch.zeros(len(wanted), dtype=torch.float64, device=weights.device)
    return sums.index_copy_(0, rows, _block_sums(kept).sum(-1))


def _draw_again(weights: _Weights, chosen: int, top_p: float, uniform: Uniform) -> int:
    """A column of one row that is within the nucleus: `chosen`, if it is, or else one that is more
    probable. Each round leaves out what is less probable."""
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


def _pick(weights: Tensor, sums: Tensor, uniforms: Seq[Uniform]) -> Tensor:
    """A column of each row in proportion to its weight: the first at which the sum so far passes a
    random share of the whole. The block of columns is looked for first."""
    num_columns = weights.shape[1]
    numbers = torch.tensor([each() for each in uniforms], dtype=torch.float64)
    share = numbers.clamp_(max=_BELOW_ONE).to(weights.device)[:, None]
    so_far = sums.cumsum(-1)
    target = share * so_far[:, -1:]
    block = (so_far <= target).sum(-1, keepdim=True)
    # Inside, what is left of the share, since a block's own sum so far is rounded otherwise.
    in_block = sums.gather(1, block)
    share = 1 - (so_far.gather(1, block) - target) / in_block
    columns = block * _BLOCK + torch.arange(_BLOCK, device=weights.device)
    found = weights.gather(1, columns.clamp(max=num_columns - 1)).double()
    so_far = found.masked_fill_(columns >= num_columns, 0).cumsum(-1)
    target = share.clamp_(0, _BELOW_ONE) * so_far[:, -1:]
    return block[:, 0] * _BLOCK + (so_far <= target).sum(-1)


def _block_sums(weights: Tensor) -> Tensor:
    """[rows, blocks] of `_BLOCK` columns each, the last of what is left."""
    whole = weights.shape[1] // _BLOCK * _BLOCK
    blocks = weights[:, :whole].view(len(weights), -1, _BLOCK).sum(-1)
    rest = weights[:, whole:].sum(-1, keepdim=True)
    return torch.cat([blocks, rest], dim=1).double()
