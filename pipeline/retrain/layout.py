"""Packs token sequences into blocks, and turns blocks into the rows that a model computes.

A block holds several sequences one after another, without padding. In a block, the position ids of
each sequence start at 0 again. There are three layouts of the blocks of a batch. Which of them a
model can compute is found by measurement, because no sequence may see another one:

- `packed` takes the blocks as they are. For most models with attention, transformers builds a mask
  from the position ids that keeps the sequences apart. For other models (Bloom, Falcon, OPT, Mamba
  and its hybrids), it builds no such mask, so a sequence would see the sequences before it.
- `prefixed` is for sequences with a common beginning, for example that of a chat template. The
  model computes this beginning once per row instead of once per sequence. This needs a mask of our
  own. Models with a sliding window do not accept this mask. Models that do not use torch's
  attention do not accept it either.
- `padded` gives each sequence a row of its own (`row_groups`), padded at its end. The padding does
  no harm, because a causal model never sees later tokens. A model that the padding disturbs all the
  same cannot be trained.
"""

import inspect
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, takewhile
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pipeline.retrain.errors import BaseModelError
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
Layout = Literal["prefixed", "packed", "padded"]

_LEAK = 1e-5
"""The largest share of a hidden state that may change when another document changes. If a model
keeps documents apart, nothing should change. But in a mixture of experts, rounding may depend on
the other rows."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows that a model computes together, padded at their ends. The tensors have the shape (N,
    T)."""

    token_ids: Tensor
    labels: Tensor
    """At each position, the next token if the model learns to predict it, and otherwise -1."""
    noisy: Tensor
    """At each position, whether training may add noise to the embedding of the token."""
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
    shared = replace(_part(sequences[0], slice(prefix)), is_noisy=False)
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
    return replace(sequence, token_ids=sequence.token_ids[part], learned=sequence.learned[part])


def _batch(blocks: Blocks, order: Sequence[int], rounded_to: int) -> Batch:
    width = -(-_width(blocks) // rounded_to) * rounded_to
    token_ids = torch.zeros(len(blocks), width, dtype=torch.long)
    position_ids = torch.zeros(len(blocks), width, dtype=torch.long)
    labels = torch.full((len(blocks), width), -1, dtype=torch.long)
    noisy = torch.zeros(len(blocks), width, dtype=torch.bool)
    for number, block in enumerate(blocks):
        start = 0
        for sequence in block:
            length = len(sequence.token_ids)
            ids = torch.tensor(sequence.token_ids)
            token_ids[number, start : start + length] = ids
            position_ids[number, start : start + length] = torch.arange(length)
            predicted = torch.where(torch.tensor(sequence.learned[1:]), ids[1:], -1)
            labels[number, start : start + length - 1] = predicted
            noisy[number, start : start + length] = sequence.is_noisy
            start += length
        # The padding is like one more sequence: it has no labels, and no other sequence sees it.
        position_ids[number, start:] = torch.arange(width - start)
    return Batch(token_ids, labels, noisy, order, position_ids)


def layout_of(model: PreTrainedModel) -> Layout:
    """The fastest layout in which `model` computes the same as for each document alone. Raises
    BaseModelError if there is none.

    The first call for a model tries the layouts with a few dozen tokens. Later calls return the
    same result.
    """
    if not hasattr(model, "_layout"):
        with in_evaluation(model):
            model._layout = _measure(model)
    layout: Layout = model._layout
    return layout


def arranged(model: PreTrainedModel, blocks: Blocks, rounded_to: int = 1) -> list[Batch]:
    """The sequences of the blocks in the layout of `model`. The length of the rows is a multiple of
    `rounded_to`."""
    layout = layout_of(model)
    if layout == "padded":
        return row_groups(blocks, rounded_to)
    shared = prefixed(blocks, rounded_to) if layout == "prefixed" else None
    return [shared or packed(blocks, rounded_to)]


def last_hidden_states(
    model: PreTrainedModel,
    token_ids: Tensor,
    position_ids: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """(B, T) token ids → (B, T, H), the hidden states that the output layer gets. position_ids:
    None to count each row from 0. They are dropped if the model takes no position ids. mask: (B, 1,
    T, T), or None for a causal mask."""
    given = {}
    if position_ids is not None and _takes_position_ids(model):
        given["position_ids"] = position_ids.to(model.device)
    if mask is not None:
        given["attention_mask"] = mask.to(model.device)
    output = model.base_model(input_ids=token_ids.to(model.device), use_cache=False, **given)
    hidden: Tensor = output.last_hidden_state
    return hidden


@contextmanager
def in_evaluation(model: PreTrainedModel) -> Iterator[None]:
    """Inside, `model` computes without dropout and gradients, in the precision of its weights."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), torch.autocast(model.device.type, enabled=False):
            yield
    finally:
        model.train(was_training)


def random_document(model: PreTrainedModel, num_tokens: int, seed: int) -> Tensor:
    """(T,) random token ids, the same for the same seed. This does not change the random numbers
    that the training draws."""
    generator = torch.Generator().manual_seed(seed)
    num_ids = model.get_input_embeddings().weight.shape[0]
    return torch.randint(num_ids, (num_tokens,), generator=generator)


def close_to(found: Tensor, expected: Tensor) -> bool:
    """Whether the two tensors differ only by rounding. NaN counts as equal to NaN: with broken
    weights, the training itself fails later, with a better message."""
    tolerance = max(1e-4, 8 * torch.finfo(expected.dtype).eps)
    largest = float(expected.abs().nan_to_num().max())
    return torch.allclose(
        found.float(), expected.float(), rtol=0, atol=tolerance * largest, equal_nan=True
    )


def _measure(model: PreTrainedModel) -> Layout:
    first, other, second = documents = [
        TokenSequence(tuple(random_document(model, size, seed).tolist()), (True,) * size, 0)
        for seed, size in enumerate((11, 11, 17))
    ]
    alone = [last_hidden_states(model, packed([[each]]).token_ids)[0] for each in documents]
    if _takes_position_ids(model):
        # Two rows, because flash attention keeps documents apart only in a batch of one row.
        rows = [packed([[each, second]] * 2) for each in (first, other)]
        after_first, after_other = (
            last_hidden_states(model, each.token_ids, each.position_ids)[0, -17:] for each in rows
        )
        leak = (after_first - after_other).abs().max()
        if leak <= _LEAK * alone[2].abs().max() and close_to(after_first, alone[2]):
            return "prefixed" if _shares_prefixes(model) else "packed"
    beside = last_hidden_states(model, packed([[each] for each in documents]).token_ids)
    if all(close_to(row[: len(own)], own) for row, own in zip(beside, alone, strict=True)):
        return "padded"
    raise BaseModelError(
        f"a {type(model).__name__} cannot be trained here: padding at the end of a text changes "
        "what it computes; take another base model"
    )


def _shares_prefixes(model: PreTrainedModel) -> bool:
    config = model.config.get_text_config()
    if getattr(config, "sliding_window", None) or config._attn_implementation != "sdpa":
        return False
    shared, *ends = (random_document(model, size, size).tolist() for size in (9, 5, 11))
    sequences = [
        TokenSequence((*shared, *end), (False,) * 10 + (True,) * (len(end) - 1), 0) for end in ends
    ]
    row = prefixed([sequences])
    assert row is not None
    hidden = last_hidden_states(model, row.token_ids, row.position_ids, row.mask)
    expected = last_hidden_states(model, packed([sequences[1:]]).token_ids)
    return close_to(hidden[0, -11:], expected[0, -11:])


def _takes_position_ids(model: PreTrainedModel) -> bool:
    return "position_ids" in inspect.signature(model.base_model.forward).parameters
