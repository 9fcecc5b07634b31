"""Token sequences → blocks, and blocks → the rows that a model computes.

A block holds several sequences one after another, without padding. Their position ids start at 0
again, from which transformers builds a mask that keeps them apart, for most models. For the others,
`row_groups` gives each sequence of a batch a row of its own. `prefixed` computes a beginning that
all sequences have in common, as that of a chat template, once for many of them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

import torch
from torch import Tensor

from pipeline.retrain.tokens import TokenSequence

OPEN_BLOCKS = 32
"""Blocks kept open while packing: enough that less than 2 % is padding, few enough to be quick."""
MIN_PREFIX = 8
"""Tokens that sequences must begin with in common, for them to be computed once."""
PREFIXED_LENGTH = 512
"""Of a row that shares its beginning, if its blocks are shorter: long enough for several sequences,
short enough that attention costs little beside the rest."""
FILLING = 1.1
"""Room in such rows, as a multiple of what they hold, so that packing needs no further row."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Blocks to compute together: all of shape (B, T)."""

    token_ids: Tensor
    position_ids: Tensor
    labels: Tensor
    """The next token, where it is to be predicted; else -1."""
    num_tokens: int
    """Without padding."""


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows that a model computes together, padded at their ends: all of shape (N, T)."""

    token_ids: Tensor
    labels: Tensor
    """As in `Batch`."""
    places: Tensor
    """Where the token is in the batch, as an index into the flattened blocks."""
    position_ids: Tensor | None = None
    """None where each row is one sequence."""
    mask: Tensor | None = None
    """(N, 1, T, T): whether a token (third axis) looks at another (last axis). None where this
    follows from the position ids."""


def pack(lengths: Sequence[int], block_length: int) -> list[list[int]]:
    """Indices of the sequences in each block, first fit in the order given.

    Every length must be at most `block_length`. A block is closed when it is the fullest of
    `OPEN_BLOCKS` open ones and nothing fits.
    """
    done: list[list[int]] = []
    open_blocks: list[tuple[list[int], int]] = []
    for index, length in enumerate(lengths):
        for place, (block, used) in enumerate(open_blocks):
            if used + length <= block_length:
                block.append(index)
                open_blocks[place] = (block, used + length)
                break
        else:
            if len(open_blocks) == OPEN_BLOCKS:
                fullest = max(range(OPEN_BLOCKS), key=lambda place: open_blocks[place][1])
                done.append(open_blocks.pop(fullest)[0])
            open_blocks.append(([index], length))
    return done + [block for block, _ in open_blocks]


def block_length(sequences: Sequence[TokenSequence]) -> int:
    """As short as the sequences allow, since attention pays for length: a multiple of 64."""
    longest = max(len(sequence.token_ids) for sequence in sequences)
    return max(128, -(-longest // 64) * 64)


def batch(sequences: Sequence[TokenSequence], blocks: Sequence[Sequence[int]]) -> Batch:
    """The blocks as tensors, padded at their ends to the longest of them."""
    width = max(sum(len(sequences[i].token_ids) for i in block) for block in blocks)
    token_ids = torch.zeros(len(blocks), width, dtype=torch.long)
    position_ids = torch.zeros(len(blocks), width, dtype=torch.long)
    labels = torch.full((len(blocks), width), -1, dtype=torch.long)
    num_tokens = 0
    for number, block in enumerate(blocks):
        start = 0
        for index in block:
            sequence = sequences[index]
            length = len(sequence.token_ids)
            ids = torch.tensor(sequence.token_ids)
            token_ids[number, start : start + length] = ids
            position_ids[number, start : start + length] = torch.arange(length)
            to_predict = ids if sequence.labels is None else torch.tensor(sequence.labels)
            predicted = torch.where(torch.tensor(sequence.learned[1:]), to_predict[1:], -1)
            labels[number, start : start + length - 1] = predicted
            start += length
        num_tokens += start
        # Padding is one more sequence of its own: no label, seen by nobody.
        position_ids[number, start:] = torch.arange(width - start)
    return Batch(token_ids, position_ids, labels, num_tokens)


def row_groups(part: Batch, min_filled: float) -> list[RowGroup]:
    """The sequences of a batch that have something to learn, in groups of similar length.

    In each row at least the share `min_filled` is no padding, so that all groups together take
    about the time and the memory of the packed batch; none is larger than that.
    """
    documents = _documents(part)
    groups: list[list[tuple[int, int]]] = []
    longest = 0
    for length, start in sorted(documents, key=itemgetter(0), reverse=True):
        fits = groups and (len(groups[-1]) + 1) * longest <= part.token_ids.numel()
        if fits and length >= min_filled * longest:
            groups[-1].append((length, start))
        else:
            groups.append([(length, start)])
            longest = length
    return [_row_group(part, group) for group in groups]


def packed(part: Batch) -> RowGroup:
    """The blocks as they are."""
    places = torch.arange(part.token_ids.numel()).view_as(part.token_ids)
    return RowGroup(part.token_ids, part.labels, places, part.position_ids)


def prefixed(part: Batch) -> RowGroup | None:
    """The sequences of a batch that have something to learn, in rows that begin with what all of
    them have in common. None where that is less than `MIN_PREFIX` tokens, or nothing is shared."""
    documents = _documents(part)
    prefix = _common_prefix(part, documents)
    if prefix < MIN_PREFIX or len(documents) < 2:
        return None
    lengths = [length - prefix for length, _ in documents]
    num_rows = math.ceil(sum(lengths) / (max(part.token_ids.shape[1], PREFIXED_LENGTH) - prefix))
    # Rows of about one length, since the shorter ones are padded.
    rows = pack(lengths, max([*lengths, math.ceil(FILLING * sum(lengths) / num_rows)]))
    if len(rows) == len(documents):
        return None
    width = prefix + max(sum(lengths[i] for i in row) for row in rows)
    token_ids, position_ids, labels, places, owners = (
        torch.full((len(rows), width), filler) for filler in (0, 0, -1, 0, -1)
    )
    ids, next_ids = part.token_ids.flatten(), part.labels.flatten()
    start_of_first = documents[0][1]
    token_ids[:, :prefix] = ids[start_of_first : start_of_first + prefix]
    position_ids[:, :prefix] = torch.arange(prefix)
    owners[:, :prefix] = 0
    for number, row in enumerate(rows):
        begin = prefix
        for owner, index in enumerate(row, start=1):
            length, start = documents[index]
            own = slice(begin, begin + length - prefix)
            there = slice(start + prefix, start + length)
            token_ids[number, own] = ids[there]
            labels[number, own] = next_ids[there]
            position_ids[number, own] = torch.arange(prefix, length)
            places[number, own] = torch.arange(there.start, there.stop)
            owners[number, own] = owner
            begin = own.stop
    return RowGroup(token_ids, labels, places, position_ids, prefix_mask(owners))


def prefix_mask(owners: Tensor) -> Tensor:
    """Who looks at whom, (N, 1, T, T), where token t of a row belongs to sequence `owners[n, t]`:
    each at what stands before it in its own sequence, and at what belongs to all (0)."""
    is_visible = (owners[:, :, None] == owners[:, None, :]) | (owners[:, None, :] == 0)
    return is_visible.tril()[:, None]


def _documents(part: Batch) -> list[tuple[int, int]]:
    """Length and start, in the flattened blocks, of each sequence that has something to learn."""
    starts = (part.position_ids.flatten() == 0).nonzero().flatten()
    ends = torch.cat([starts[1:], starts.new_tensor([part.token_ids.numel()])])
    labels = part.labels.flatten()
    return [
        (end - start, start)
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True)
        if (labels[start:end] >= 0).any()
    ]


def _common_prefix(part: Batch, documents: Sequence[tuple[int, int]]) -> int:
    """How many tokens all documents begin with, up to the first that predicts one to learn."""
    ids, labels = part.token_ids.flatten(), part.labels.flatten()
    shared: Tensor | None = None
    for length, start in documents:
        first_label = int((labels[start : start + length] >= 0).int().argmax())
        own = ids[start : start + first_label]
        if shared is None:
            shared = own
        size = min(len(shared), len(own))
        shared = shared[: int((shared[:size] == own[:size]).int().cumprod(0).sum())]
    return 0 if shared is None else len(shared)


def _row_group(part: Batch, documents: Sequence[tuple[int, int]]) -> RowGroup:
    """The documents of these lengths and starts, the longest first."""
    offsets = torch.arange(documents[0][0])
    lengths, starts = torch.tensor(documents).t()[..., None]
    is_filled = offsets < lengths
    places = torch.where(is_filled, starts + offsets, 0)
    return RowGroup(
        token_ids=torch.where(is_filled, part.token_ids.flatten()[places], 0),
        labels=torch.where(is_filled, part.labels.flatten()[places], -1),
        places=places,
    )
