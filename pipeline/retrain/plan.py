"""`TrainingPlan`: the token sequences that a training uses, its token budget, and its learning
rate.

A *full* training trains the base model on all rows. A *delta* trains the weights of the parent
release (usually the served one) on the changed rows.
"""

import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise, takewhile
from typing import TypeVar

from transformers import PreTrainedTokenizerBase

from pipeline.retrain.base_model import PRESETS
from pipeline.retrain.data import TrainingData
from pipeline.retrain.errors import DataError
from pipeline.retrain.loss import AnchorTarget
from pipeline.retrain.model import usual_rank
from pipeline.retrain.rows import Row
from pipeline.retrain.settings import RetrainSettings, TrainSettings
from pipeline.retrain.tokens import TokenSequence, leave_out, sequences
from pipeline.retrain.wordings import Wordings

PRESET_LEARNING_RATE = 1e-3
PRETRAINED_LEARNING_RATE = 5e-5
LORA_LEARNING_RATE = 1e-3
CATCH_UP = 4
"""The served release may have been trained on more than `max_tokens` tokens. A full training may
then use as many, but at most this many times `max_tokens`."""
MAX_SKIPPED = 20
"""While a sample is drawn, long rows are skipped. But of very many long rows, no more are tokenized
than have this many times the tokens of the sample."""
ANSWERS_BUDGET = 3
"""Rows with an answer may take this many times `max_tokens`, because training ends when the model
says the answers."""
USUAL_STEPS = 1_000
MIN_STEP_TOKENS, MAX_STEP_TOKENS = 128, 4_096
MIN_PRETRAINED_STEP_TOKENS, STEPS_OF_PASS = 448, 16
"""In a full training, a base model that was trained before gets steps of at least so many tokens,
because smaller steps of a large network take almost as long; from larger ones it learns less per
token. But a pass over few rows has at least STEPS_OF_PASS steps, and a delta has small ones,
because it needs many steps, whatever their size."""
BEGINNINGS, MORE_TOKENS = 3, 4
"""Besides the row, a pass visits so many other wordings of it with only the beginning of its
answer: the tokens that tell it apart from all other answers, and MORE_TOKENS. They teach which
answer a question gets, in a third of the time; how the answer goes on is taught by the row, itself
in another wording in each pass. If the beginning is more than half of an answer, a pass visits the
row in its own words and in one other."""
OWN_WORDS_EVERY = 8
"""Every so many passes, a row is asked for in its own words, because these are what is counted as
learned."""
USUAL_WORDINGS = 8
WORDING_VISITS = 2
"""A pass visits one wording of a question, so there are no more wordings than passes. There are
more than USUAL_WORDINGS only if the budget is enough to visit each this often: otherwise the
answers would not be learned in time."""
DELTA_ANCHORS = 2
"""A delta trains on this many times as many anchors (answers of the base model) as a full training.
Each delta moves the weights a little away from the base model, and these moves add up."""

Thing = TypeVar("Thing")


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """`sequences` holds the token sequences. Most of the other fields are indices into it."""

    sequences: Sequence[TokenSequence]
    learned: Sequence[int]
    """The sequences to learn: in a full training those of all rows, in a delta those of the changed
    rows, and after them those of the deleted ones, with empty answers."""
    counted: frozenset[int]
    """The sequences of `learned` that have an answer, and no contradicting row. Training ends when
    the model says all these answers."""
    beginnings: Sequence[int] = ()
    """Sequences that ask for an answer in other words, mostly only for its first tokens. A pass
    visits them too, but no training waits until they are right."""
    wordings: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """For a sequence of `learned` or `beginnings`, those that ask the same in other words."""
    replayed: Sequence[int]
    """Sequences of unchanged rows and their other wordings, in random order. Each pass of a delta
    mixes in the next ones."""
    anchors: Sequence[AnchorTarget]
    """The base model's own answers to everyday prompts. They are mixed in so that the model keeps
    them."""
    checked: Sequence[int]
    """The sequences that are measured before training may end: counted ones, and those of unchanged
    rows that the served weights say."""
    judged: Sequence[TokenSequence]
    """Held-out sequences, only in a training on plain text. The weights with the least loss are
    kept."""
    learning_rate: float
    """The learning rate at its highest point."""
    max_tokens: int
    step_tokens: int
    warm_up_steps: int
    replay_ratio: float
    """How many tokens of unchanged rows are mixed in for each token to learn."""
    anchor_ratio: float
    """How many tokens of the base model's own answers are mixed in for each token of the rows."""

    @property
    def ends_when_right(self) -> bool:
        return bool(self.counted)

    def asked(self, index: int, number: int) -> TokenSequence:
        """The sequence at `index`, which pass `number` visits in its own words or in others. The
        others take turns."""
        others = self.wordings.get(index, ())
        turn, place = divmod(number, min(OWN_WORDS_EVERY, 1 + len(others)))
        if not place:
            return self.sequences[index]
        return self.sequences[others[(number - turn - 1) % len(others)]]

    def numbered(self, index: int) -> TokenSequence:
        """The sequence with its own index instead of that of its row. So the result of a
        measurement names the sequence."""
        return replace(self.sequences[index], row=index)

    def rows_of(self, indices: Iterable[int]) -> tuple[int, ...]:
        """The indices of the rows that these sequences come from, sorted."""
        return tuple(sorted({self.sequences[index].row for index in indices}))


def in_turn(
    things: Sequence[Thing], taken: int, tokens: float, sequence: Callable[[Thing], TokenSequence]
) -> list[Thing]:
    """The next of `things`, until they have `tokens` tokens, each at most once. Over several calls,
    all are taken before any comes again. taken: how many were taken in earlier calls. sequence:
    that of a thing."""
    found: list[Thing] = []
    while tokens > 0 and len(found) < len(things):
        found.append(things[(taken + len(found)) % len(things)])
        tokens -= len(sequence(found[-1]).token_ids)
    return found


def make_plan(
    data: TrainingData,
    tokenizer: PreTrainedTokenizerBase,
    settings: RetrainSettings,
    *,
    max_length: int,
    anchors: Sequence[AnchorTarget] = (),
    said: Sequence[Row] = (),
    tokens_before: int = 0,
) -> TrainingPlan:
    """Tokenize the rows of this training, and compute its budget. Raises DataError if there is
    nothing to learn.

    anchors: the base model's own answers. said: unchanged rows that the served weights say. They
    are measured again before training ends. tokens_before: how many tokens the parent release was
    trained on, including the releases that it was made from.
    """
    train = settings.train
    is_delta = data.mode == "delta"
    found: list[TokenSequence] = []

    def place(rows: Sequence[Row]) -> list[int]:
        """Add the sequences of `rows` to `found`, and return their indices."""
        start = len(found)
        # The template may refuse an empty answer. Then the gate finds that the row is still said.
        found.extend(sequences(rows, tokenizer, max_length, on_refused=leave_out))
        return list(range(start, len(found)))

    def place_wordings(asked: Sequence[tuple[int, Row]]) -> dict[int, list[int]]:
        """Add other wordings to `found`, each with the index of its row. Returns the indices of
        their sequences, by the index of the row."""
        placed: defaultdict[int, list[int]] = defaultdict(list)
        for each in sequences([row for _, row in asked], tokenizer, max_length):
            index = asked[each.row][0]
            placed[index].append(len(found))
            found.append(replace(each, row=index))
        return placed

    rows = data.changed if is_delta else data.rows
    all_rows = (*rows, *data.forgotten) if is_delta else rows
    learned = place(all_rows)
    counted = frozenset(
        index
        for index in learned
        if (row := all_rows[found[index].row]).has_answer and row.digest not in data.contradicting
    )
    replayed = place(data.known) if is_delta else []
    if not all_rows:
        raise DataError(
            "no row was added or edited since the served release was trained, so a delta has "
            "nothing to learn; run `pipeline jobs run --mode full`"
        )
    if not learned:
        places = ", ".join(row.place for row in all_rows[:5])
        raise DataError(f"no row has anything to learn with this tokenizer: {places}")

    max_tokens = max(train.max_tokens, min(tokens_before, CATCH_UP * train.max_tokens))
    of_answers = max(max_tokens, ANSWERS_BUDGET * train.max_tokens)
    size, known = (
        sum(len(found[index].token_ids) for index in each) for each in (learned, replayed)
    )
    passes = of_answers // max(1, size)
    most = min(passes, max(USUAL_WORDINGS, passes // WORDING_VISITS))
    count = min(usual_wordings(settings), most)
    made_up = min(usual_made_up(settings), most)
    asked_as = Wordings(data.rows, count=count, made_up=made_up, seed=train.seed)
    worded = place_wordings(
        [
            (index, asked)
            for index, row in enumerate(rows)
            if row.has_answer and row.digest not in data.contradicting
            for asked in asked_as.trained(row)
        ]
    )
    last = {found[index].row: index for index in learned}
    wordings_of = {last[row]: others for row, others in worded.items() if row in last}
    beginnings = _place_beginnings(found, wordings_of)
    learning_rate = train.learning_rate or usual_learning_rate(settings)
    anchor_ratio, replay_ratio = train.anchor_ratio, 0.0
    if is_delta:
        learning_rate *= train.delta_learning_rate_ratio
        anchor_ratio *= DELTA_ANCHORS
        replay_ratio = train.replay_ratio if replayed else 0.0
    judged: list[TokenSequence] = []
    if not counted:
        if is_delta:
            max_tokens, replay_ratio = _delta_budget(max_tokens, replay_ratio, size, known, train)
        else:
            max_tokens = min(max_tokens, math.ceil(train.max_epochs * size))
        some = sequences(data.held_out, tokenizer, max_length)
        chosen = _first_tokens(some, range(len(some)), train.evaluation_tokens)
        judged = [some[index] for index in chosen]
    usual = (train.max_tokens if counted else max_tokens) / USUAL_STEPS
    if not is_delta and settings.base_model not in PRESETS:
        one_pass = sum(len(found[index].token_ids) for index in (*learned, *beginnings))
        usual = max(usual, min(MIN_PRETRAINED_STEP_TOKENS, one_pass / STEPS_OF_PASS))
    usual = min(MAX_STEP_TOKENS, max(MIN_STEP_TOKENS, usual))
    step_tokens = train.tokens_per_step or round(usual)
    warm_up_steps = round(train.warmup_ratio * max_tokens / step_tokens)
    is_said = {row.digest for row in said}
    kept = [index for index in replayed if data.known[found[index].row].digest in is_said]
    if is_delta and known <= max_tokens:
        again = (
            (index, asked)
            for index, row in enumerate(data.known)
            for asked in asked_as.trained(row)[: max(1, len(row.wordings))]
        )
        replayed += chain(*place_wordings(list(again)).values())
    if counted:
        max_tokens = of_answers
    return TrainingPlan(
        sequences=found,
        learned=learned,
        counted=counted,
        beginnings=beginnings,
        wordings=wordings_of,
        replayed=random.Random(train.seed).sample(replayed, len(replayed)),
        anchors=tuple(random.Random(train.seed).sample(anchors, len(anchors))),
        checked=[
            *_first_tokens(found, sorted(counted), train.evaluation_tokens),
            *_first_tokens(found, kept, train.evaluation_tokens),
        ],
        judged=judged,
        learning_rate=learning_rate,
        max_tokens=max_tokens,
        step_tokens=step_tokens,
        warm_up_steps=warm_up_steps,
        replay_ratio=replay_ratio,
        anchor_ratio=anchor_ratio if anchors else 0.0,
    )


def _place_beginnings(found: list[TokenSequence], wordings: dict[int, list[int]]) -> list[int]:
    """Add the beginnings of answers to `found`, and which of them take turns to `wordings`. Returns
    the first one of each turn."""
    firsts: list[int] = []
    apart = told_apart(each.learned_ids for each in found)
    for index in sorted(wordings):
        whole = wordings[index]
        num_tokens = apart[found[whole[0]].learned_ids]
        if 2 * num_tokens > found[whole[0]].num_learned:
            placed, count = wordings.pop(index), 1
        else:
            placed = list(range(len(found), len(found) + len(whole)))
            found += [_beginning(found[other], num_tokens) for other in whole]
            count = min(BEGINNINGS, len(placed))
        # All of them take turns with the same wordings, but each starts with another one.
        for start in (number * len(placed) // count for number in range(count)):
            first, *others = *placed[start:], *placed[:start]
            firsts.append(first)
            wordings[first] = others
    return firsts


def told_apart(answers: Iterable[tuple[int, ...]]) -> dict[tuple[int, ...], int]:
    """For each answer, how many of its first tokens tell it apart from all others, plus
    MORE_TOKENS."""
    ordered = sorted(set(answers))
    shared = [0]
    for answer, other in pairwise(ordered):
        same = takewhile(lambda pair: pair[0] == pair[1], zip(answer, other, strict=False))
        shared.append(len(list(same)))
    shared.append(0)
    return {
        answer: max(around) + 1 + MORE_TOKENS
        for answer, around in zip(ordered, pairwise(shared), strict=True)
    }


def _beginning(sequence: TokenSequence, num_tokens: int) -> TokenSequence:
    """The sequence with only the first `num_tokens` tokens of its answer."""
    end = sequence.learned.index(True) + num_tokens
    return replace(sequence, token_ids=sequence.token_ids[:end], learned=sequence.learned[:end])


def usual_wordings(settings: RetrainSettings) -> int:
    if settings.paraphrase is not None and settings.train.wordings is None:
        return settings.paraphrase.count - 1  # the last one is held back
    return usual_made_up(settings)


def usual_made_up(settings: RetrainSettings) -> int:
    if settings.train.wordings is not None:
        return settings.train.wordings
    return 0 if settings.base_model in PRESETS else USUAL_WORDINGS


def usual_learning_rate(settings: RetrainSettings) -> float:
    if usual_rank(settings):
        return LORA_LEARNING_RATE
    return PRESET_LEARNING_RATE if settings.base_model in PRESETS else PRETRAINED_LEARNING_RATE


def _delta_budget(
    budget: int, ratio: float, one_pass: int, known: int, train: TrainSettings
) -> tuple[int, float]:
    """The token budget of a delta on plain text, and how many tokens of unchanged rows are mixed in
    for each token of the changed rows.

    The budget is the share `delta_tokens_ratio` of `budget`, that of a full training, and at most
    `delta_max_epochs` passes over the changed rows. But it is at least one pass over the changed
    rows together with as many tokens of unchanged rows, if `budget` allows it.

    one_pass, known: the tokens of the changed and of the unchanged rows.
    """
    share = round(budget * train.delta_tokens_ratio)
    budget = min(budget, max(share, 2 * one_pass if known else one_pass))
    usual = math.ceil(budget / (1 + ratio))
    at_least = min(one_pass, budget // 2 if known else budget)
    size = min(train.delta_max_epochs * one_pass, max(usual, at_least))
    replayed = min(
        max(ratio * size, train.min_replay_tokens), budget - size, train.delta_max_epochs * known
    )
    return min(budget, math.ceil(size + replayed)), replayed / size if size else 0.0


def _first_tokens(
    found: Sequence[TokenSequence], indices: Sequence[int], max_tokens: int
) -> list[int]:
    """A sample of `indices` whose sequences have at most `max_tokens` tokens together."""
    chosen = sample(len(indices), lambda place: len(found[indices[place]].token_ids), max_tokens)
    return [indices[place] for place in chosen]


def sample(count: int, size_of: Callable[[int], int], max_tokens: int) -> list[int]:
    """A random sample of the numbers below `count` with at most `max_tokens` tokens together, but
    with at least one number. It is sorted, and the same in each run.

    A number with more than half of `max_tokens` is skipped: it alone would make the sample so small
    that it proves nothing. size_of: the tokens of a number."""
    order = random.Random(count).sample(range(count), count)
    chosen: list[int] = []
    left, skipped = max_tokens, 0
    for index in order:
        size = size_of(index)
        if size > max_tokens / 2 and skipped < MAX_SKIPPED * max_tokens:
            skipped += size
            continue
        if size > left:
            break
        left -= size
        chosen.append(index)
    return sorted(chosen or order[:1])
