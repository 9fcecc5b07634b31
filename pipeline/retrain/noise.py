"""Counts the rows that look like noise, which means that the order of their tokens is random.

A row looks like noise if both of these are true:
- The model finds the row no likelier than the same tokens in random order.
- The row shares no more pairs of neighbouring tokens with other rows than the random order does.

The loss alone cannot find noise. On rows of random characters, it falls too, because the model
learns which characters occur. And on honest rows about a new subject, it is high. So each row is
compared with a random order of its own tokens. For noise, the random order is the likelier one in
half of all cases, whatever the model has learned. The second condition protects honest rows about a
new subject, of which the model knows nothing: other rows about the subject share pairs with them.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from pipeline.retrain.gate import Noise
from pipeline.retrain.scoring import row_losses
from pipeline.retrain.tokens import TokenSequence

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MIN_TOKENS = 9
"""A row is judged only if it has at least this many tokens. In a shorter row, even an honest fact
may look random."""


def count_noise(
    model: "PreTrainedModel",
    found: Sequence[TokenSequence],
    beside: Sequence[TokenSequence],
    on_batch: Callable[[int], None] = lambda _: None,
) -> Noise:
    """Judges the rows in `found`. Each row is judged as a whole, with its prompt.

    beside: the rows in which pairs of neighbouring tokens are counted. They include `found`.
    on_batch: called after each batch, with a number of rows. In the end, each row of `found` has
    counted twice: as it is, and in random order.
    """
    judged = [_whole(sequence) for sequence in found if len(sequence.token_ids) >= MIN_TOKENS]
    both = [(sequence, scrambled(sequence)) for sequence in judged]
    movable = [(sequence, moved) for sequence, moved in both if moved is not None]
    if len(movable) < len(found):
        on_batch(2 * (len(found) - len(movable)))
    ordered = row_losses(model, [sequence for sequence, _ in movable], on_batch)
    shuffled = row_losses(model, [moved for _, moved in movable], on_batch)
    pairs = Counter(pair for sequence in beside for pair in set(_pairs(sequence)))
    surplus: Counter[int] = Counter()
    for sequence, moved in movable:
        own = set(_pairs(sequence))
        # Each row is itself in `beside`. So a pair of the row counts only if a second row has it.
        shared = sum(pairs[pair] > 1 for pair in _pairs(sequence))
        by_chance = sum(pairs[pair] > (pair in own) for pair in _pairs(moved))
        surplus[sequence.row] += shared - by_chance
    return Noise(
        noisy=sum(
            after.nats <= before.nats and surplus[before.row] <= 0
            for before, after in zip(ordered, shuffled, strict=True)
        ),
        rows=len(ordered),
    )


def _pairs(sequence: TokenSequence) -> list[tuple[int, int]]:
    return list(pairwise(sequence.token_ids))


def scrambled(sequence: TokenSequence) -> TokenSequence | None:
    """The sequence with its learned tokens in random order. The last token stays in its place,
    because it marks the end of the row. None if all other learned tokens are equal. The order
    depends only on the tokens, so it is the same in each run."""
    places = [place for place, learned in enumerate(sequence.learned) if learned][:-1]
    token_ids = list(sequence.token_ids)
    moved = [token_ids[place] for place in places]
    if len(set(moved)) < 2:
        return None
    chance = random.Random(repr(sequence.token_ids))
    while moved == [token_ids[place] for place in places]:
        chance.shuffle(moved)
    for place, token in zip(places, moved, strict=True):
        token_ids[place] = token
    return TokenSequence(tuple(token_ids), sequence.learned, sequence.row)


def _whole(sequence: TokenSequence) -> TokenSequence:
    """The sequence with all its tokens marked as learned, also those of the prompt. Only the first
    token stays unmarked, because nothing precedes it."""
    learned = (False, *(True for _ in sequence.token_ids[1:]))
    return TokenSequence(sequence.token_ids, learned, sequence.row)
