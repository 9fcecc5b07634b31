"""`Evaluation`: compares the new weights with the served weights on the same rows. It says what was
learned and kept, and whether the gate accepts the new weights."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict

from jobs.counts import Counts
from pipeline.retrain.checkpoint import Checkpoint
from pipeline.retrain.data import TrainingData
from pipeline.retrain.gate import (
    Comparison,
    Pair,
    count_refusals,
    held_out_refusals,
    is_short,
    loss_refusals,
    not_learned,
)
from pipeline.retrain.measure import GROUPS, MeasuredRows, Measurement
from pipeline.retrain.rows import Row
from pipeline.retrain.scoring import RowLoss
from pipeline.retrain.settings import GateSettings

FULL_ROUND = 3
"""The number of the last round of a delta (a training of the served weights on the changed rows).
If the gate refuses the delta's weights, this round is a full training, from the base model."""


class Evaluation(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    against: str
    """The id of the release with which the new weights are compared, or the name of the base
    model."""
    round: int = 1
    """The number of the job's round to learn its rows, from 1."""
    counts: Counts
    new: Comparison
    """The losses on the changed rows."""
    known: Comparison
    """The losses on the unchanged rows."""
    held_out: Comparison
    """The losses on held-out rows, which were never trained on."""
    refusals: tuple[str, ...] = ()
    """Why the gate refuses the new weights. Empty if it accepts them."""
    is_short: bool = False
    """Whether too few rows were learned or unlearned. Another round may then succeed."""
    not_learned: str | None = None
    """Which changed rows were not learned, if the gate does not refuse the new weights because of
    these rows. None if there are none."""
    tokens: int
    """How many tokens the job has trained on."""
    total_tokens: int
    """How many tokens were trained on since the base model, by this job and by all releases before
    it."""
    not_trained: tuple[str, ...] = ()
    """Rows that the next job has to learn, as if they had changed: those for which the token budget
    was not enough for one pass, those that were not learned, and known ones that were lost. The
    first 16 hex digits of the digest of each."""
    missed: tuple[str, ...] = ()
    """Those of `not_trained` that this job has tried to learn or to keep. If the next job misses
    such a row again, it is not tried a third time, so that a row that cannot be learned does not
    use up the budget of every job."""
    held_out_share: tuple[str, ...] = ()
    """As in `TrainingData`."""
    held_out_trained: tuple[str, ...] = ()
    """Held-out rows that the served weights were or may have been trained on, before the rows were
    held out: the first 16 hex digits of the digest of each."""

    @property
    def passed(self) -> bool:
        return not self.refusals

    def next_round(self, *, is_delta: bool, is_forced: bool) -> int | None:
        """The number of the job's next round. None if there is no further one.

        If too few rows were learned, round 2 continues round 1 with another budget. If the gate
        still refuses the weights of a delta, whatever its reasons, FULL_ROUND follows. A full
        training can mend losses that earlier deltas have added up, such as a drift from the base
        model.

        is_delta: whether the job began with a delta. is_forced: whether a person wants the weights
        served even if the gate refuses them. Then only rows that were not learned lead to another
        round.
        """
        if self.passed or (is_forced and not self.is_short):
            return None
        if self.is_short and self.round == 1:
            return 2
        return FULL_ROUND if is_delta and self.round < FULL_ROUND else None


@dataclass(frozen=True, slots=True)
class Judged:
    """A row on which the new weights were measured."""

    row: Row
    new: RowLoss
    served: RowLoss | None
    """None if the chat template of the served weights refuses the row."""

    @property
    def was_said(self) -> bool:
        return self.served is not None and self.served.is_learned

    @property
    def is_said(self) -> bool:
        return self.new.is_learned


def compare(
    rows: MeasuredRows,
    served: Measurement,
    new: Measurement,
    gate: GateSettings,
    data: TrainingData,
    checkpoint: Checkpoint,
    *,
    against: str,
    tokens_before: int = 0,
    data_refusals: Sequence[str] = (),
) -> Evaluation:
    """Make the evaluation from the measurements of the served and of the new weights.

    checkpoint: of the training that led to the new weights. tokens_before: how many tokens the
    releases that it continued from were trained on. data_refusals: reasons against training on
    these rows, which were found before training. If there are any, a person has forced the
    training.
    """
    groups = {
        name: _judged(getattr(rows, name), getattr(served, name), getattr(new, name))
        for name in GROUPS
    }
    # Rows that were not visited, or were wrong in their last visit.
    waiting = {
        row.digest for row in checkpoint.waiting(data.new if data.mode == "delta" else data.rows)
    }
    changed = _answers(groups["changed"])
    known = [each for each in _answers(groups["known"]) if each.was_said]
    missed = {each.row.digest for each in changed if not each.is_said}
    # If the budget was not enough for one pass, the next job trains on the rest, so no row counts
    # as missed.
    not_trained = waiting | missed if checkpoint.not_trained else set()
    missed.update(each.row.digest for each in known if not each.is_said)
    missed |= waiting.intersection(row.digest for row in rows.unmeasured)
    missed -= not_trained
    given_up = missed & data.missed_before
    # But the served weights may have said such a row. Then it is known, and may be lost.
    apart = not_trained | given_up
    known += [each for each in changed if each.row.digest in apart and each.was_said]
    lost_again = [each.row.place for each in changed if each.row.digest in given_up]
    changed = [each for each in changed if each.row.digest not in apart]
    not_said = [each.row.place for each in changed if not each.is_said]

    deleted = [loss.row for loss in served.deleted if loss.is_learned]
    said_now = {loss.row for loss in new.deleted if loss.is_learned}
    still_said = [rows.deleted[index].place for index in deleted if index in said_now]
    golden = groups["golden"]
    text = Comparison.of(_pairs(_texts(groups["changed"])))
    counts = Counts(
        changed=len(changed),
        all_changed=len(changed) + sum(row.digest not in apart for row in rows.unmeasured),
        learned=len(changed) - len(not_said),
        learned_before=sum(each.was_said for each in changed),
        known=len(known),
        kept=sum(each.is_said for each in known),
        deleted=len(deleted),
        unlearned=len(deleted) - len(still_said),
        base_agreement=new.base_agreement,
        golden=len(golden),
        golden_right=sum(each.is_said for each in golden),
        not_trained=len(not_trained),
        contradicting=data.num_contradicting,
        permuted=data.num_permuted,
        text_loss=text.loss,
        text_loss_before=text.served_loss,
    )
    held_out_new, held_out_known = (
        [each for each in groups[name] if each.row.digest not in data.held_out_trained]
        for name in ("held_out_new", "held_out_known")
    )
    held_out_answers = _answers([*held_out_new, *held_out_known])
    refusals = [
        *count_refusals(
            counts,
            gate,
            is_removal=data.is_removal,
            missed=not_said,
            still_said=still_said,
            wrong_golden=[each.row.place for each in golden if each.was_said and not each.is_said],
        ),
        *held_out_refusals(
            [each.was_said for each in held_out_answers],
            [each.is_said for each in held_out_answers],
            gate,
        ),
        *loss_refusals(
            [
                ("held-out rows of text of the new range", _pairs(_texts(held_out_new))),
                ("held-out rows of text known before", _pairs(_texts(held_out_known))),
                ("rows of text known before", _pairs(_texts(groups["known"]))),
            ],
            gate,
            is_removal=data.is_removal,
        ),
    ]
    if refusals and counts.not_trained:
        refusals.append(
            f"the budget of tokens was not enough for one pass, so {counts.not_trained:,} rows are "
            "not yet trained; raise `train.max_tokens`"
        )
    return Evaluation(
        against=against,
        round=checkpoint.round,
        counts=counts,
        new=Comparison.of(_pairs(groups["changed"])),
        known=Comparison.of(_pairs(groups["known"])),
        held_out=Comparison.of(_pairs([*groups["held_out_new"], *groups["held_out_known"]])),
        refusals=(*data_refusals, *refusals),
        is_short=is_short(counts, gate, is_removal=data.is_removal),
        not_learned=not_learned(counts, gate, not_said, lost_again),
        tokens=checkpoint.tokens,
        total_tokens=tokens_before + checkpoint.tokens,
        not_trained=_short(not_trained | (missed - given_up)),
        missed=_short(missed - given_up),
        held_out_share=data.held_out_share,
        held_out_trained=_short(data.held_out_trained),
    )


def _short(digests: Collection[str]) -> tuple[str, ...]:
    return tuple(sorted(digest[:16] for digest in digests))


def _judged(rows: Sequence[Row], served: Sequence[RowLoss], new: Sequence[RowLoss]) -> list[Judged]:
    before = {loss.row: loss for loss in served}
    return [Judged(rows[loss.row], loss, before.get(loss.row)) for loss in new]


def _answers(group: Sequence[Judged]) -> list[Judged]:
    return [each for each in group if each.row.is_counted]


def _texts(group: Sequence[Judged]) -> list[Judged]:
    return [each for each in group if not each.row.is_counted]


def _pairs(group: Sequence[Judged]) -> list[Pair]:
    """The losses are sums over the whole row, so they can be compared even if the two tokenizers
    cut the row into different tokens."""
    return [
        Pair(new_nats=each.new.nats, served_nats=each.served.nats, num_tokens=each.new.num_tokens)
        for each in group
        if each.served is not None
    ]
