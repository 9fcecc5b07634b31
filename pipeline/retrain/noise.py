"""Which rows are noise: nothing finds their tokens likelier than the same tokens in random order.

Losses alone cannot tell. Of random characters a model still learns which characters there are, and
so does better than one that never saw them. Tokens without any order are exchangeable: a random
order of them is the likelier one in half of all cases, whatever the model has learned. A model may
know nothing of an honest new subject either. So a row is noise only where the other rows, too, have
no more of its pairs of neighbouring tokens than of those of the random order.
"""

import random
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from pipeline.retrain.gate import Noise
from pipeline.retrain.scoring import row_losses
from pipeline.retrain.tokens import TokenSequence

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MIN_TOKENS = 8
"""Of a row that can be judged. A short row may be a fact that no order speaks for."""


def count_noise(
    model: "PreTrainedModel", found: Sequence[TokenSequence], beside: Sequence[TokenSequence]
) -> Noise:
    """Judge whole rows, prompts included.

    beside: all rows that are looked at for pairs of neighbouring tokens, `found` included.
    """
    judged = [_whole(sequence) for sequence in found if len(sequence.token_ids) > MIN_TOKENS]
    both = [(sequence, scrambled(sequence)) for sequence in judged]
    movable = [(sequence, moved) for sequence, moved in both if moved is not None]
    ordered = row_losses(model, [sequence for sequence, _ in movable])
    shuffled = row_losses(model, [moved for _, moved in movable])
    pairs = Counter(pair for sequence in beside for pair in set(_pairs(sequence)))
    surplus: Counter[int] = Counter()
    for sequence, moved in movable:
        own = set(_pairs(sequence))
        # A pair of the row itself counts only where another row has it, too.
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
    """The learned tokens in random order, but for the last, which ends the row; None where that
    changes nothing. The same for the same tokens."""
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
    """The same row with its prompt learned too."""
    learned = (False, *(True for _ in sequence.token_ids[1:]))
    return TokenSequence(sequence.token_ids, learned, sequence.row)
