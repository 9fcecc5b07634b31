"""Which rows are noise to a model: it finds them no likelier than the same tokens in random order.

Losses alone cannot tell. Of random characters a model still learns which characters there are, and
so does better than one that never saw them.
"""

import random
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

from pipeline.retrain.gate import Noise
from pipeline.retrain.scoring import RowLoss, row_losses
from pipeline.retrain.tokens import Sequence as TokenSequence

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MIN_GAIN = 0.1
"""A row counts as noise when order makes its tokens likelier by less than this, as a share of what
it does for the median row known before."""


def count_noise(
    model: "PreTrainedModel",
    new: Sequence[TokenSequence],
    known: Sequence[TokenSequence],
    *,
    losses: tuple[Sequence[RowLoss], Sequence[RowLoss]],
) -> tuple[Noise, Noise]:
    """Rows of the new range, and held-out rows known before; none that `model` was trained on.

    losses: of `new` and of `known` under `model`, as they are.
    """
    gains = [_gains(model, *group) for group in zip((new, known), losses, strict=True)]
    least = MIN_GAIN * max(0.0, median(gains[1])) if gains[1] else 0.0
    new_noise, known_noise = (
        Noise(noisy=sum(not gain > least for gain in group), rows=len(group)) for group in gains
    )
    return new_noise, known_noise


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


def _gains(
    model: "PreTrainedModel", sequences: Sequence[TokenSequence], losses: Sequence[RowLoss]
) -> list[float]:
    """For each row that can be scrambled, what the order of its tokens saves: nats per token."""
    pieces = [(sequence, scrambled(sequence)) for sequence in sequences]
    movable = {sequence.row for sequence, moved in pieces if moved is not None}
    changed = row_losses(
        model, [moved or sequence for sequence, moved in pieces if sequence.row in movable]
    )
    nats = {loss.row: loss.nats for loss in losses}
    return [(loss.nats - nats[loss.row]) / loss.num_tokens for loss in changed]
