"""Rows → the token sequences of one training: what is new, what is replayed, what is held out."""

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipeline.retrain.base_model import PRESETS
from pipeline.retrain.data import Data
from pipeline.retrain.errors import DataError
from pipeline.retrain.settings import RetrainSettings, TrainSettings
from pipeline.retrain.tokens import Sequence as TokenSequence
from pipeline.retrain.tokens import sequences
from pipeline.retrain.train import Lessons

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PRESET_LEARNING_RATE = 1e-3
PRETRAINED_LEARNING_RATE = 5e-5
CATCH_UP = 4
"""A full training takes at most this many times `max_tokens` to get as far as what is served."""


def prepare(
    data: Data,
    tokenizer: "PreTrainedTokenizerBase",
    settings: RetrainSettings,
    *,
    max_length: int,
    tokens_before: int,
) -> Lessons:
    """Tokenize what this training sees. Raises DataError where nothing is left to learn.

    tokens_before: what the parent release was trained on, from its base model on.
    """
    train = settings.train
    new = sequences(data.new, tokenizer, max_length)
    known = sequences(data.known, tokenizer, max_length)
    held_out = [
        sequences(rows, tokenizer, max_length) for rows in (data.held_out_new, data.held_out_known)
    ]
    peak = train.learning_rate or (
        PRESET_LEARNING_RATE if settings.base_model in PRESETS else PRETRAINED_LEARNING_RATE
    )
    if data.mode == "full":
        training, max_epochs = new + known, train.max_epochs
        budget = max(train.max_tokens, min(tokens_before, CATCH_UP * train.max_tokens))
    else:
        training, max_epochs = new + replay_sample(new, known, train), train.delta_max_epochs
        budget = round(train.max_tokens * train.delta_tokens_ratio)
        peak *= train.delta_learning_rate_ratio
    if not training or not any(held_out):
        raise DataError("no row has anything to learn: every text or completion is empty")
    return Lessons(
        training=training,
        held_out=held_out,
        learning_rate=peak,
        max_tokens=budget,
        max_epochs=max_epochs,
    )


def replay_sample(
    new: Sequence[TokenSequence], known: Sequence[TokenSequence], settings: TrainSettings
) -> list[TokenSequence]:
    """A random choice of `known`, as large as the settings say; the same for the same rows."""
    wanted = max(settings.min_replay_tokens, settings.replay_ratio * _num_tokens(new))
    order = list(known)
    random.Random(f"{settings.seed} {len(new)} {len(known)}").shuffle(order)
    sample, size = [], 0
    for sequence in order:
        if size >= wanted:
            break
        sample.append(sequence)
        size += len(sequence.token_ids)
    return sample


def _num_tokens(found: Sequence[TokenSequence]) -> int:
    return sum(len(sequence.token_ids) for sequence in found)
