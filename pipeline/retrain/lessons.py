"""Rows → the token sequences of one training: what is new, what is replayed, what is held out."""

import math
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
LORA_LEARNING_RATE = 10 * PRETRAINED_LEARNING_RATE
"""Ten times that of all weights: https://thinkingmachines.ai/blog/lora/"""
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
    min_share = 1.0
    peak = train.learning_rate or _usual_learning_rate(settings)
    budget = max(train.max_tokens, min(tokens_before, CATCH_UP * train.max_tokens))
    if data.mode == "full":
        training, max_epochs = new + known, train.max_epochs
    else:
        budget = round(budget * train.delta_tokens_ratio)
        training, max_epochs = delta_mix(new, known, budget, train), 1.0
        peak *= train.delta_learning_rate_ratio
        min_share = train.delta_min_share
    if not training or not any(held_out):
        raise DataError("no row has anything to learn: every text or completion is empty")
    return Lessons(
        training=training,
        held_out=held_out,
        learning_rate=peak,
        max_tokens=budget,
        max_epochs=max_epochs,
        min_trained_share=min_share,
    )


def _usual_learning_rate(settings: RetrainSettings) -> float:
    if settings.train.lora_rank is not None:
        return LORA_LEARNING_RATE
    return PRESET_LEARNING_RATE if settings.base_model in PRESETS else PRETRAINED_LEARNING_RATE


def delta_mix(
    new: Sequence[TokenSequence],
    known: Sequence[TokenSequence],
    max_tokens: int,
    settings: TrainSettings,
) -> list[TokenSequence]:
    """What a delta sees, once and in any order: the new rows, repeated as far as the settings and
    `max_tokens` go, and a replay of rows known before. No known row comes again before all of them
    came once: a few of them, repeated, are soon known by heart at the cost of all others."""
    replay_ratio = settings.replay_ratio if known else 0.0
    size = min(
        settings.delta_max_epochs * _num_tokens(new), math.ceil(max_tokens / (1 + replay_ratio))
    )
    replayed = min(
        max(replay_ratio * size, settings.min_replay_tokens),
        max_tokens - size,
        settings.delta_max_epochs * _num_tokens(known),
    )
    seed = f"{settings.seed} {len(new)} {len(known)}"
    return [*_repeated(new, size, seed), *_repeated(known, replayed, seed)]


def _repeated(rows: Sequence[TokenSequence], num_tokens: float, seed: str) -> list[TokenSequence]:
    """At most `num_tokens` of the rows, but one: all of them before one comes again, in an order
    that is the same for the same rows."""
    chance = random.Random(seed)
    taken: list[TokenSequence] = []
    left = num_tokens
    while rows and left > 0:
        for sequence in chance.sample(rows, len(rows)):
            if taken and left < len(sequence.token_ids):
                return taken
            taken.append(sequence)
            left -= len(sequence.token_ids)
    return taken


def _num_tokens(found: Sequence[TokenSequence]) -> int:
    return sum(len(sequence.token_ids) for sequence in found)
