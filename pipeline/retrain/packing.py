"""Token sequences → blocks without padding between them, in which no sequence sees another.

A block holds several sequences one after another; their position ids start at 0 again, from which
transformers builds a block-diagonal causal mask.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.retrain.tokens import Sequence as TokenSequence

OPEN_BLOCKS = 32
"""Blocks kept open while packing: enough that less than 2 % is padding, few enough to be quick."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Blocks to compute together: all of shape (B, T)."""

    token_ids: Tensor
    position_ids: Tensor
    labels: Tensor
    """The next token, where it is to be predicted; else -1."""
    num_tokens: int
    """Without padding."""


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
            predicted = torch.where(torch.tensor(sequence.learned[1:]), ids[1:], -1)
            labels[number, start : start + length - 1] = predicted
            start += length
        num_tokens += start
        # Padding is one more sequence of its own: no label, seen by nobody.
        position_ids[number, start:] = torch.arange(width - start)
    return Batch(token_ids, position_ids, labels, num_tokens)


def epochs(sequences: Sequence[TokenSequence], length: int, seed: int) -> Iterator[list[list[int]]]:
    """Without end: the blocks of one pass after another, shuffled anew for each."""
    epoch = 0
    while True:
        order = list(range(len(sequences)))
        random.Random(f"{seed} {epoch}").shuffle(order)
        blocks = pack([len(sequences[i].token_ids) for i in order], length)
        passed = [[order[i] for i in block] for block in blocks]
        random.Random(f"{seed} {epoch} blocks").shuffle(passed)
        yield passed
        epoch += 1
