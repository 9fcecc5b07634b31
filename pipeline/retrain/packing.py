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
from dataclasses import dataclass
from operator import itemgetter

import torch
from torch import Tensor
from torch.nn.functional import pad

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
to 1,024 of them, of about 1 MB each. So that there are few shapes, numbers of rows are rounded up
to a multiple of this number."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Blocks to compute together. All tensors have the shape (B, T)."""

    token_ids: Tensor
    position_ids: Tensor
    labels: Tensor
    """At each position, the next token if the model learns to predict it, and otherwise -1."""


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows that a model computes together, padded at their ends. The tensors have the shape (N,
    T)."""

    token_ids: Tensor
    labels: Tensor
    """As in `Batch`."""
    places: Tensor
    """For each token, its index in the flattened blocks of the batch."""
    position_ids: Tensor | None = None
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


def batch(blocks: Sequence[Sequence[TokenSequence]]) -> Batch:
    """The blocks as tensors. Shorter blocks are padded at their ends to the length of the
    longest."""
    width = max(sum(len(each.token_ids) for each in block) for block in blocks)
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
    return Batch(token_ids, position_ids, labels)


def row_groups(part: Batch) -> list[RowGroup]:
    """The sequences of a batch that have something to learn, each in a row of its own. Sequences of
    similar length are in one group.

    No group is larger than the batch. So all groups together take about as much time as the packed
    batch, and each group takes at most as much memory.
    """
    documents = _documents(part)
    groups: list[list[tuple[int, int]]] = []
    longest = 0
    for length, start in sorted(documents, key=itemgetter(0), reverse=True):
        fits = groups and (len(groups[-1]) + 1) * longest <= part.token_ids.numel()
        if fits and length >= MIN_FILLED * longest:
            groups[-1].append((length, start))
        else:
            groups.append([(length, start)])
            longest = length
    return [_row_group(part, group) for group in groups]


def packed(part: Batch) -> RowGroup:
    """The blocks of the batch, one per row."""
    places = torch.arange(part.token_ids.numel()).view_as(part.token_ids)
    return RowGroup(part.token_ids, part.labels, places, part.position_ids)


def rounded_up(group: RowGroup) -> RowGroup:
    """The group with padding at the end of its rows, so that their length is a multiple of
    `ROUNDED_TO`."""
    missing = -group.token_ids.shape[1] % ROUNDED_TO
    positions, mask = group.position_ids, group.mask
    if positions is not None:
        # The padding is like one more sequence: it has no labels, and no other sequence sees it.
        filler = torch.arange(missing).expand(len(positions), -1)
        positions = torch.cat([positions, filler], dim=1)
    if mask is not None:
        mask = pad(mask, (0, missing, 0, missing))
        mask = mask | torch.eye(mask.shape[-1], dtype=torch.bool)
    return RowGroup(
        token_ids=pad(group.token_ids, (0, missing)),
        labels=pad(group.labels, (0, missing), value=-1),
        places=pad(group.places, (0, missing)),
        position_ids=positions,
        mask=mask,
    )


def prefixed(part: Batch) -> RowGroup | None:
    """The sequences of a batch that have something to learn, in rows that begin with the common
    beginning of all these sequences. None if the common beginning is shorter than `MIN_PREFIX`, or
    if no row would hold more than one sequence."""
    documents = _documents(part)
    prefix = _common_prefix(part, documents)
    if prefix < MIN_PREFIX or len(documents) < 2:
        return None
    lengths = [length - prefix for length, _ in documents]
    num_rows = math.ceil(sum(lengths) / (max(part.token_ids.shape[1], PREFIXED_LENGTH) - prefix))
    # Make rows of about equal length, because shorter rows are padded.
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
    """The attention mask, (N, 1, T, T), of rows in which token t of row n belongs to the sequence
    `owners[n, t]`. A token sees itself, the tokens before it in its own sequence, and the common
    beginning (owner 0)."""
    is_visible = (owners[:, :, None] == owners[:, None, :]) | (owners[:, None, :] == 0)
    return is_visible.tril()[:, None]


def _documents(part: Batch) -> list[tuple[int, int]]:
    """The length, and the start in the flattened blocks, of each sequence with something to
    learn."""
    starts = (part.position_ids.flatten() == 0).nonzero().flatten()
    ends = torch.cat([starts[1:], starts.new_tensor([part.token_ids.numel()])])
    labels = part.labels.flatten()
    return [
        (end - start, start)
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True)
        if (labels[start:end] >= 0).any()
    ]


def _common_prefix(part: Batch, documents: Sequence[tuple[int, int]]) -> int:
    """The number of tokens in the common beginning of all documents. It ends before the first token
    of any document that predicts a learned token."""
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
    """A group of rows with one document each. `documents` are pairs of length and start, the
    longest document first."""
    offsets = torch.arange(documents[0][0])
    lengths, starts = torch.tensor(documents).t()[..., None]
    is_filled = offsets < lengths
    places = torch.where(is_filled, starts + offsets, 0)
    return RowGroup(
        token_ids=torch.where(is_filled, part.token_ids.flatten()[places], 0),
        labels=torch.where(is_filled, part.labels.flatten()[places], -1),
        places=places,
    )
