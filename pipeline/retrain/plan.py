"""`TrainingPlan`: what one training sees, in tokens, and how long it may take."""

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.retrain.base_answers import AnchorTarget
from pipeline.retrain.base_model import PRESETS
from pipeline.retrain.data import TrainingData
from pipeline.retrain.errors import DataError
from pipeline.retrain.model import usual_rank
from pipeline.retrain.packing import block_length
from pipeline.retrain.rows import Row
from pipeline.retrain.scoring import mean_loss, row_losses
from pipeline.retrain.settings import RetrainSettings, TrainSettings
from pipeline.retrain.token_cache import TokenCache
from pipeline.retrain.tokens import TokenSequence

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PRESET_LEARNING_RATE = 1e-3
PRETRAINED_LEARNING_RATE = 5e-5
LORA_LEARNING_RATE = 2e-3
CATCH_UP = 4
"""A full training takes at most this many times `max_tokens` to get as far as what is served."""
USUAL_STEPS = 1_000
MIN_STEP_TOKENS, MAX_STEP_TOKENS = 128, 4_096
DELTA_ANCHORS = 2
"""A delta sees this many times as many anchors: it is short, and what it drifts adds to what the
deltas before it did."""
EVALUATIONS = 12
"""How often the held-out loss of text is measured."""


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """`sequences` holds all token sequences; the other fields are indices into it."""

    sequences: Sequence[TokenSequence]
    learned: Sequence[int]
    """To be learned: of a full training all rows, of a delta those that changed."""
    counted: frozenset[int]
    """Of these, the ones with an answer that no other row contradicts: training ends once the model
    says all of them."""
    replayed: Sequence[int]
    """Known rows, mixed in."""
    anchors: Sequence[AnchorTarget]
    """The base model's own answers, which the model is to go on giving."""
    unlearned: Sequence[int]
    """Deleted rows, whose answers are to be said no more."""
    checked: Sequence[int]
    """What is measured before training may end: counted rows, and known rows that the served
    weights say."""
    judged: Sequence[Sequence[TokenSequence]]
    """Groups whose mean loss chooses the weights of a training on text; they count alike."""
    averaged: Sequence[tuple[Sequence[TokenSequence], int]]
    """Groups whose loss chooses an average with the parent, each with its weight."""
    min_trained_share: float
    """The least share of the trained weights in such an average; 1 takes none."""
    learning_rate: float
    """At the peak."""
    max_tokens: int
    step_tokens: int
    warm_up_steps: int
    replay_ratio: float
    """Tokens of known rows for each token that is to be learned."""
    anchor_ratio: float
    """The same for the base model's own answers."""

    @property
    def ends_when_right(self) -> bool:
        return bool(self.counted or self.unlearned)

    @property
    def is_averaged(self) -> bool:
        return self.min_trained_share < 1 and len(self.averaged) == 2

    @cached_property
    def block_length(self) -> int:
        return block_length(self.sequences)

    @cached_property
    def blocks_per_step(self) -> int:
        return max(1, round(self.step_tokens / self.block_length))

    def num_tokens(self, indices: Iterable[int]) -> int:
        return sum(len(self.sequences[index].token_ids) for index in indices)

    def steps_left(self, tokens: int) -> int:
        return math.ceil(max(0, self.max_tokens - tokens) / self.step_tokens)

    def is_due(self, tokens: int, measured_at: int) -> bool:
        """Whether the held-out loss is to be measured after `tokens`, the last time being then."""
        interval = max(1, self.max_tokens // EVALUATIONS)
        return bool(self.judged) and not self.ends_when_right and tokens - measured_at >= interval

    def numbered(self, index: int) -> TokenSequence:
        """The sequence with its index as its row, so that a measurement tells which one it was."""
        return replace(self.sequences[index], row=index)

    def rows_of(self, indices: Iterable[int]) -> tuple[int, ...]:
        """The rows that these sequences come from, in order."""
        return tuple(sorted({self.sequences[index].row for index in indices}))

    def next_of(
        self, indices: Sequence[int], taken: int, tokens: float, seed: str
    ) -> tuple[list[int], int]:
        """The next of `indices`, after the `taken` first ones, up to `tokens`: all of them in
        random order before one comes again. Each at most once. Returns what is taken then, too."""
        found: dict[int, None] = {}
        while indices and tokens > 0 and len(found) < len(indices):
            round_number, place = divmod(taken, len(indices))
            order = random.Random(f"{seed} {round_number}").sample(indices, len(indices))
            for index in order[place:]:
                if tokens <= 0 or len(found) == len(indices):
                    break
                taken += 1
                if index not in found:
                    found[index] = None
                    tokens -= len(self.sequences[index].token_ids)
        return list(found), taken

    def next_anchors(self, taken: int, tokens: int) -> list[AnchorTarget]:
        """The anchors of a step that has so many `tokens` of rows: `anchor_ratio` of that, and one
        at least; after the `taken` first ones. None where there are none, or the ratio is 0."""
        left = self.anchor_ratio * tokens
        chosen: list[AnchorTarget] = []
        if not self.anchors or not left:
            return chosen
        while not chosen or (left > 0 and len(chosen) < len(self.anchors)):
            anchor = self.anchors[(taken + len(chosen)) % len(self.anchors)]
            left -= len(anchor.sequence.token_ids)
            chosen.append(anchor)
        return chosen

    def next_unlearned(self, step: int) -> list[int]:
        """The deleted rows of a step: as many as it has room for, in turns."""
        if not self.unlearned:
            return []
        longest = max(len(self.sequences[index].token_ids) for index in self.unlearned)
        count = min(len(self.unlearned), max(1, self.step_tokens // longest))
        return [
            self.unlearned[(step * count + place) % len(self.unlearned)] for place in range(count)
        ]

    def averaged_loss(self, model: "PreTrainedModel") -> float:
        """Per token of both groups together, by their weights."""
        losses = [mean_loss(row_losses(model, group)) for group, _ in self.averaged]
        weights = [weight for _, weight in self.averaged]
        return sum(a * b for a, b in zip(losses, weights, strict=True)) / sum(weights)


def make_plan(
    data: TrainingData,
    tokenizer: "PreTrainedTokenizerBase",
    settings: RetrainSettings,
    *,
    max_length: int,
    anchors: Sequence[AnchorTarget] = (),
    said: Sequence[Row] = (),
    tokens_before: int = 0,
    attempt: int = 1,
    cache_dir: Path | None = None,
) -> TrainingPlan:
    """Tokenize what this training sees. Raises DataError where nothing is left to learn.

    anchors: the base model's own answers. said: known rows that the served weights say, measured
    again before training ends. tokens_before: what the parent release was trained on, from its base
    model on. attempt: each one after the first has the budget once more, counted from the first on.
    cache_dir: where the tokens of rows are kept for the next job.
    """
    train = settings.train
    is_delta = data.mode == "delta"
    tokens = TokenCache(cache_dir, tokenizer, max_length)
    found: list[TokenSequence] = []

    def place(rows: Sequence[Row]) -> list[int]:
        """The indices of the sequences of `rows`."""
        start = len(found)
        found.extend(tokens.sequences(rows))
        return list(range(start, len(found)))

    rows = data.new if is_delta else data.rows
    learned = place(rows)
    contradicting = {data.rows[index].digest for group in data.contradictions for index in group}
    counted = frozenset(
        index
        for index in learned
        if (row := rows[found[index].row]).is_counted and row.digest not in contradicting
    )
    unlearned = place([row for row in data.deleted if row.is_counted]) if is_delta else []
    replayed = place(data.known) if is_delta else []
    known = [data.known[found[index].row].digest for index in replayed]
    said_digests = {row.digest for row in said}
    if not learned and not unlearned:
        raise DataError("no row has anything to learn: every text or completion is empty")

    plan = TrainingPlan(
        sequences=found,
        learned=learned,
        counted=counted,
        replayed=replayed,
        anchors=tuple(random.Random(train.seed).sample(anchors, len(anchors))),
        unlearned=unlearned,
        checked=[
            *_first_tokens(found, sorted(counted), train.evaluation_tokens),
            *_first_tokens(
                found,
                [i for i, digest in zip(replayed, known, strict=True) if digest in said_digests],
                train.evaluation_tokens,
            ),
        ],
        judged=(),
        averaged=(),
        min_trained_share=1.0,
        learning_rate=train.learning_rate or usual_learning_rate(settings),
        max_tokens=max(train.max_tokens, min(tokens_before, CATCH_UP * train.max_tokens)) * attempt,
        step_tokens=1,
        warm_up_steps=1,
        replay_ratio=0.0,
        anchor_ratio=train.anchor_ratio * (DELTA_ANCHORS if is_delta else 1) if anchors else 0.0,
    )
    plan = _with_delta_budget(plan, train) if is_delta else _with_full_budget(plan, train)
    if not plan.ends_when_right:
        plan = _judged_by_loss(plan, data, tokens, train)
    tokens.save()
    step_tokens = train.tokens_per_step or round(
        min(MAX_STEP_TOKENS, max(MIN_STEP_TOKENS, plan.max_tokens / USUAL_STEPS))
    )
    return replace(
        plan,
        step_tokens=step_tokens,
        warm_up_steps=round(train.warmup_ratio * plan.max_tokens / step_tokens),
    )


def usual_learning_rate(settings: RetrainSettings) -> float:
    if usual_rank(settings):
        return LORA_LEARNING_RATE
    return PRESET_LEARNING_RATE if settings.base_model in PRESETS else PRETRAINED_LEARNING_RATE


def _with_full_budget(plan: TrainingPlan, train: TrainSettings) -> TrainingPlan:
    """Text ends after `max_epochs`; rows with an answer when they are right."""
    if plan.ends_when_right:
        return plan
    size = math.ceil(train.max_epochs * plan.num_tokens(plan.learned))
    return replace(plan, max_tokens=min(plan.max_tokens, size))


def _with_delta_budget(plan: TrainingPlan, train: TrainSettings) -> TrainingPlan:
    """For text a share of what a full training would take, and `delta_max_epochs` at most; but one
    pass over the changed rows, beside as many tokens of known ones, as far as `max_tokens` goes.
    Rows with an answer end their training themselves."""
    one_pass = plan.num_tokens(plan.learned)
    budget = plan.max_tokens
    if not plan.ends_when_right:
        share = round(budget * train.delta_tokens_ratio)
        budget = min(budget, max(share, 2 * one_pass if plan.replayed else one_pass))
    ratio = train.replay_ratio if plan.replayed else 0.0
    plan = replace(
        plan,
        max_tokens=budget,
        replay_ratio=ratio,
        learning_rate=plan.learning_rate * train.delta_learning_rate_ratio,
    )
    if plan.ends_when_right:
        return plan
    usual = math.ceil(budget / (1 + ratio))
    at_least = min(one_pass, budget // 2 if plan.replayed else budget)
    size = min(train.delta_max_epochs * one_pass, max(usual, at_least))
    replayed = min(
        max(ratio * size, train.min_replay_tokens),
        budget - size,
        train.delta_max_epochs * plan.num_tokens(plan.replayed),
    )
    return replace(
        plan,
        max_tokens=min(budget, math.ceil(size + replayed)),
        replay_ratio=replayed / size if size else 0.0,
        min_trained_share=train.delta_min_share,
    )


def _judged_by_loss(
    plan: TrainingPlan,
    data: TrainingData,
    tokens: TokenCache,
    train: TrainSettings,
) -> TrainingPlan:
    """Text is judged by its held-out rows. An average with the parent is judged by the rows that
    the gate compares: an average chosen by held-out rows alone may forget more of the known rows
    than the gate allows."""

    def taken(rows: Sequence[Row], factor: int = 1) -> list[TokenSequence]:
        some = tokens.sequences(rows)
        kept = _first_tokens(some, range(len(some)), factor * train.evaluation_tokens)
        return [some[index] for index in kept]

    groups = [taken(data.held_out_new), taken(data.held_out_known)]
    pairs = [
        (data.held_out_new or data.new, data.new),
        ([*data.held_out_known, *data.known], data.known),
    ]
    return replace(
        plan,
        judged=[group for group in groups if group],
        averaged=[
            (taken(measured, 4), sum(_num_characters(row) for row in counted))
            for measured, counted in pairs
            if measured and counted
        ],
    )


def _num_characters(row: Row) -> int:
    return len(row.text or "") + len(row.question or "") + len(row.answer or "")


def _first_tokens(
    found: Sequence[TokenSequence], indices: Sequence[int], max_tokens: int
) -> list[int]:
    """The first of `indices`, in an order that is the same for the same rows, up to `max_tokens`;
    one at least."""
    chosen: list[int] = []
    left = max_tokens
    for index in random.Random(len(indices)).sample(list(indices), len(indices)):
        if chosen and left < len(found[index].token_ids):
            break
        chosen.append(index)
        left -= len(found[index].token_ids)
    return sorted(chosen)
