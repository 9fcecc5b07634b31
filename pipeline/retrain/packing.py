"""Packs token sequences into blocks, and turns blocks into the rows that a model computes.

A block holds several sequences one after another, without padding. In a block, the position ids of
each sequence start at 0 again. For most models, transformers builds a mask from these ids, so that
no sequence sees another one. There are three ways to make rows from the blocks of a batch:
- `packed` takes the blocks as they are.
- `prefixed` is for sequences with a common beginning, for example that of a chat template. The
  model computes this beginning once per row instead of once per sequence.
- `row_groups` gives each sequence a row of its own. It is for models that do not keep the sequences
  of a block apart.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, takewhile

import torch
from torch import Tensor

from pipeline.retrain.tokens import TokenSequence

OPEN_BLOCKS = 32
"""How many blocks are kept open for more sequences while packing. With this many, less than 2 % of
the blocks is padding, and packing is still quick."""
MIN_PREFIX = 8
"""Sequences share their beginning (`prefixed`) only if it has at least this many tokens."""
PREFIXED_LENGTH = 512
"""The usual length of the rows that `prefixed` makes. If the blocks of the batch are longer, the
rows are as long as the blocks. A row of this length has room for several sequences, and attention
still takes little of the time."""
MIN_FILLED = 0.75
"""At least this share of the rows that `row_groups` makes is tokens. The rest is padding."""
FILLING = 1.1
"""The rows that `prefixed` makes get this many times the room that their tokens need. Otherwise,
packing would often need one more row."""
ROUNDED_TO = 64
"""In bfloat16 on a CPU, torch makes a program for each new shape of a matrix product, and keeps up
to 1,024 of them, of about 1 MB each. So that there are few shapes, numbers of rows and their length
are rounded up to a multiple of this number."""

Blocks = Sequence[Sequence[TokenSequence]]


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows that a model computes together, padded at their ends. The tensors have the shape (N,
    T)."""

    token_ids: Tensor
    labels: Tensor
    """At each position, the next token if the model learns to predict it, and otherwise -1."""
    order: Sequence[int]
    """The numbers of the sequences, in the order in which they stand in the rows."""
    position_ids: Tensor | None
    """None if each row is one sequence."""
    mask: Tensor | None = None
    """(N, 1, T, T): whether a token (third axis) sees another token (last axis). None if this
    follows from the position ids."""


def pack(lengths: Sequence[int], block_length: int) -> list[list[int]]:
    """Put sequences of these lengths into blocks. Returns, for each block, the indices of its
    sequences.

    Each sequence goes into the first open block with enough room. If there is none, a new block is
    opened. If OPEN_BLOCKS blocks are open already, the fullest one is closed first. Every length
    must be at most `block_length`.
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
    """The length of blocks for `sequences`: the longest sequence, rounded up to a multiple of 64,
    and at least 128. Longer blocks would only make attention slower."""
    longest = max(len(sequence.token_ids) for sequence in sequences)
    return max(128, -(-longest // 64) * 64)


def packed(blocks: Blocks, rounded_to: int = 1) -> Batch:
    """The blocks, one per row. The length of the rows is a multiple of `rounded_to`, here and
    below."""
    return _batch(blocks, range(sum(map(len, blocks))), rounded_to)


def row_groups(blocks: Blocks, rounded_to: int = 1) -> list[Batch]:
    """The sequences of the blocks, each in a row of its own. Sequences of similar length are in one
    group.

    No group is larger than `packed` makes the blocks. So all groups together take about as much
    time, and each group takes at most as much memory.
    """
    sequences = list(chain(*blocks))
    lengths = [len(each.token_ids) for each in sequences]
    most = len(blocks) * _width(blocks)
    groups: list[list[int]] = []
    longest = 0
    for index in sorted(range(len(sequences)), key=lengths.__getitem__, reverse=True):
        fits = groups and (len(groups[-1]) + 1) * longest <= most
        if fits and lengths[index] >= MIN_FILLED * longest:
            groups[-1].append(index)
        else:
            groups.append([index])
            longest = lengths[index]
    made = (_batch([[sequences[i]] for i in group], group, rounded_to) for group in groups)
    return [replace(each, position_ids=None) for each in made]


def prefixed(blocks: Blocks, rounded_to: int = 1) -> Batch | None:
    """The sequences of the blocks, in rows that begin with the common beginning of all these
    sequences. None if the common beginning is shorter than `MIN_PREFIX`, or if no row would hold
    more than one sequence."""
    sequences = list(chain(*blocks))
    # The common beginning ends before the first token that predicts a learned token.
    asked = [each.token_ids[: each.learned.index(True, 1) - 1] for each in sequences]
    same = takewhile(lambda tokens: len(set(tokens)) == 1, zip(*asked, strict=False))
    prefix = len(list(same))
    if prefix < MIN_PREFIX or len(sequences) < 2:
        return None
    lengths = [len(each.token_ids) - prefix for each in sequences]
    num_rows = math.ceil(sum(lengths) / (max(_width(blocks), PREFIXED_LENGTH) - prefix))
    # Make rows of about equal length, because shorter rows are padded.
    rows = pack(lengths, max([*lengths, math.ceil(FILLING * sum(lengths) / num_rows)]))
    if len(rows) == len(sequences):
        return None
    shared = _part(sequences[0], slice(prefix))
    ends = [_part(each, slice(prefix, None)) for each in sequences]
    made = _batch(
        [[shared, *(ends[index] for index in row)] for row in rows], list(chain(*rows)), rounded_to
    )
    assert made.position_ids is not None
    starts = made.position_ids == 0
    made.position_ids[:, prefix:] += prefix
    # The model may know no positions beyond those of the sequences, so padding must have none.
    made.position_ids.clamp_(max=prefix + max(lengths) - 1)
    # A token sees itself, the tokens before it in its own sequence, and the common beginning.
    owners = starts.cumsum(1) - 1
    is_visible = (owners[:, :, None] == owners[:, None, :]) | (owners[:, None, :] == 0)
    return replace(made, mask=is_visible.tril()[:, None])


def _width(blocks: Blocks) -> int:
    return max(sum(len(each.token_ids) for each in block) for block in blocks)


def _part(sequence: TokenSequence, part: slice) -> TokenSequence:
    labels = sequence.labels
    return replace(
        sequence,
        token_ids=sequence.token_ids[part],
        learned=sequence.learned[part],
        labels=None if labels is None else labels[part],
    )


def _batch(blocks: Blocks, order: Sequence[int], rounded_to: int) -> Batch:
    width = -(-_width(blocks) // rounded_to) * rounded_to
    token_ids = torch.zeros(len(blocks), width, dtype=torch.long)
    position_ids = torch.zeros(len(blocks), width, dtype=torch.long)
    labels = torch.full((len(blocks), width), -1, dtype=torch.long)
    for number, block in enumerate(blocks):
        start = 0
        for sequence in block:
            length = len(sequence.token_ids)
            ids = torch.tensor(sequence.token_ids)
            token_ids[number, start : start + length] = ids
            position_ids[number, start : start + length] = torch.arange(length)
            to_predict = ids if sequence.labels is None else torch.tensor(sequence.labels)
            predicted = torch.where(torch.tensor(sequence.learned[1:]), to_predict[1:], -1)
            labels[number, start : start + length - 1] = predicted
            start += length
        # The padding is like one more sequence: it has no labels, and no other sequence sees it.
        position_ids[number, start:] = torch.arange(width - start)
    return Batch(token_ids, labels, order, position_ids)
