"""Measures weights on the rows of a commit: the served weights before training, and the new weights
after it."""

import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from pipeline.retrain.anchors import agreement
from pipeline.retrain.data import TrainingData
from pipeline.retrain.loss import AnchorTarget, RowLoss, row_losses
from pipeline.retrain.model import LoadedModel
from pipeline.retrain.rows import Row
from pipeline.retrain.settings import GateSettings
from pipeline.retrain.tokens import leave_out, sequences

logger = logging.getLogger(__name__)

MAX_SKIPPED = 20
"""While a sample is drawn, long rows are skipped. But of very many long rows, no more are tokenized
than have this many times the tokens of the sample."""
GROUPS = {
    "changed": "changed rows",
    "known": "rows known before",
    "deleted": "deleted rows",
    "held_out_new": "held-out rows of the new range",
    "held_out_known": "held-out rows known before",
    "golden": "golden questions",
}
"""Group of `MeasuredRows` → its rows in words."""


@dataclass(frozen=True, kw_only=True)
class MeasuredRows:
    """The rows to measure, to find out what was learned and kept. Of each group except `golden`,
    only a sample of at most `gate.max_tokens` tokens is measured. The sample is the same in each
    run."""

    changed: tuple[Row, ...]
    known: tuple[Row, ...]
    deleted: tuple[Row, ...]
    held_out_new: tuple[Row, ...]
    held_out_known: tuple[Row, ...]
    golden: tuple[Row, ...]
    unmeasured: tuple[Row, ...]
    """The changed rows that have an answer, and are not in the sample `changed`."""

    @classmethod
    def choose(
        cls,
        data: TrainingData,
        golden: Sequence[Row],
        tokenizer: PreTrainedTokenizerBase,
        max_length: int,
        gate: GateSettings,
    ) -> "MeasuredRows":
        """max_length: the largest number of tokens of a sequence. Longer answers are cut."""

        def sample(rows: Sequence[Row]) -> tuple[tuple[Row, ...], tuple[Row, ...]]:
            return _sample(rows, tokenizer, max_length, gate.max_tokens)

        new = [row for row in data.new if row.digest not in data.contradicting]
        changed, unmeasured = sample(new)
        return cls(
            changed=changed,
            known=sample([row for row in data.known if row.digest not in data.contradicting])[0],
            deleted=sample([row for row in data.deleted if row.is_counted])[0],
            held_out_new=sample(data.held_out_new)[0],
            held_out_known=sample(data.held_out_known)[0],
            golden=tuple(golden),
            unmeasured=tuple(row for row in unmeasured if row.is_counted),
        )


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The losses of the rows in `MeasuredRows`, in the same order. Rows without a learned token and
    rows that the chat template refuses have no entry. `RowLoss.row` is the index of the row in its
    group."""

    changed: Sequence[RowLoss]
    known: Sequence[RowLoss]
    deleted: Sequence[RowLoss]
    held_out_new: Sequence[RowLoss]
    held_out_known: Sequence[RowLoss]
    golden: Sequence[RowLoss]
    base_agreement: float | None
    """The share of the tokens in the base model's answers that the weights still find likeliest.
    None if this was not measured, as for a preset."""


def measure(
    loaded: LoadedModel,
    rows: MeasuredRows,
    anchors: Sequence[AnchorTarget] = (),
    *,
    skip_refused: bool = False,
    tell: Callable[[int, int], None],
) -> Measurement:
    """Measure the weights on `rows`, and on the base model's own answers to `anchors` if there are
    any.

    skip_refused: leave out the rows that the chat template of the weights refuses, instead of
    raising DataError or BaseModelError. Deleted rows that it refuses are always left out, because
    nobody can correct them any more. tell: called after each batch, with the number of rows that
    are measured, and the number of all rows to measure. A piece of a long row counts as a row, and
    so does an answer of the base model.
    """
    found = {}
    for name in GROUPS:
        skips = {"on_refused": leave_out} if skip_refused or name == "deleted" else {}
        found[name] = sequences(getattr(rows, name), loaded.tokenizer, loaded.max_length, **skips)
    expected = sum(map(len, found.values())) + len(anchors)
    measured = 0

    def on_batch(count: int) -> None:
        nonlocal measured
        measured += count
        tell(measured, expected)

    def losses(name: str) -> list[RowLoss]:
        if found[name]:
            logger.info("measuring %s %s", f"{len(getattr(rows, name)):,}", GROUPS[name])
        return row_losses(loaded.model, found[name], on_batch)

    if anchors:
        logger.info("measuring %d answers of the base model", len(anchors))
    return Measurement(
        base_agreement=agreement(loaded.model, anchors, on_batch) if anchors else None,
        **{name: losses(name) for name in GROUPS},
    )


def _sample(
    rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, max_length: int, max_tokens: int
) -> tuple[tuple[Row, ...], tuple[Row, ...]]:
    """A random sample of `rows` with at most `max_tokens` tokens, but with at least one row. Also
    returns the other rows. Both keep the order of `rows`.

    A row with more than half of `max_tokens` is chosen only if there is room after all others.
    Otherwise, it alone would make the sample so small that it proves nothing."""
    order = random.Random(len(rows)).sample(range(len(rows)), len(rows))
    chosen: set[int] = set()
    long: dict[int, int] = {}
    left = max_tokens
    for index in order:
        size = _num_measured(rows[index], tokenizer, max_length)
        if size > max_tokens / 2 and sum(long.values()) < MAX_SKIPPED * max_tokens:
            long[index] = size
            continue
        if size > left:
            break
        left -= size
        chosen.add(index)
    else:
        for index, size in long.items():
            if size <= left:
                left -= size
                chosen.add(index)
    chosen = chosen or set(order[:1])
    return (
        tuple(row for index, row in enumerate(rows) if index in chosen),
        tuple(row for index, row in enumerate(rows) if index not in chosen),
    )


def _num_measured(row: Row, tokenizer: PreTrainedTokenizerBase, max_length: int) -> int:
    """About how many tokens a measurement of `row` computes. A text is measured whole. A longer
    conversation has a sequence for each answer."""
    text = row.text or f"{row.prompt}{row.completion}"
    if row.messages is not None:
        text = "".join(str(message) for message in row.messages)
    size = len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    return min(size, max_length * len(row.turns)) if row.is_counted else size
