"""`Evaluation`: compares the new weights with the served weights on the same rows. It says what was
learned and kept, and whether the gate accepts the new weights. The gate decides from counts and
losses whether the new weights may be served.

Weights *say* a row if a model with these weights gives the row's answer. A row is *learned* if the
new weights say it, and *kept* if they still say it.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, variance

from pydantic import BaseModel, ConfigDict

from jobs.counts import Counts, Words
from pipeline.retrain.asking import Asked
from pipeline.retrain.checkpoint import Checkpoint
from pipeline.retrain.data import TrainingData
from pipeline.retrain.loss import RowLoss
from pipeline.retrain.rows import Row
from pipeline.retrain.settings import GateSettings

GROUPS = {
    "changed": "changed rows",
    "known": "rows known before",
    "deleted": "deleted rows",
    "held_out": "held-out rows",
    "golden": "golden questions",
}
"""Group of rows to measure → its rows in words."""
MIN_ROWS = 20
"""The checks of lost, of kept and of held-out rows, of questions in other words and of losses need
at least this many, because a few prove nothing."""
SIGMAS = 2.0
"""A loss, or how many answers were lost, must exceed its limit by this many standard errors before
the gate refuses. A smaller excess may be chance, because only a sample of the rows was measured."""
TOLERANCE = 0.01
"""Nats per token. The gate ignores a rise of the loss that is smaller than this. If two models both
know a row by heart, both losses are almost 0, and their ratio means nothing."""
REMOVAL_RATIO = 1.15
"""After a full training that leaves out rows that are deleted or held out now, a loss may be this
many times the loss of the served release. Many deltas may have made the served release better than
one full training can. But it is more important that the model no longer knows these rows."""


@dataclass(frozen=True, kw_only=True)
class MeasuredRows:
    """The rows to measure, to find out what was learned and kept."""

    groups: Mapping[str, tuple[Row, ...]]
    """For each of GROUPS, the rows. Of each group except `golden`, only a sample of at most
    `gate.max_tokens` tokens is measured. The sample is the same in each run."""
    unmeasured: tuple[Row, ...]
    """The changed rows that have an answer, and are not in the sample."""
    rewordings: tuple[Row, ...] = ()
    """Rows in words on which no job trains."""
    words: Words = "dataset"
    """Where these words come from."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    losses: Mapping[str, Sequence[RowLoss]]
    """For each of GROUPS, the losses of its rows, in the same order. Rows without a learned token
    and rows that the chat template refuses have no entry. `RowLoss.row` is the index of the row in
    its group."""
    base_agreement: float | None
    """The share of the tokens in the base model's answers that the weights still find likeliest.
    None if this was not measured, as for a preset."""
    reworded: Sequence[Asked] | None = None
    """What the weights say to `MeasuredRows.rewordings`. None if they were not asked."""


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


def _pairs(rows: Sequence[Judged]) -> list[tuple[RowLoss, RowLoss]]:
    """The losses of each row under the new and under the served weights. They are sums over the
    whole row, so they can be compared even if the two tokenizers cut the row into different
    tokens."""
    return [(each.new, each.served) for each in rows if each.served is not None]


class Comparison(BaseModel):
    """The losses on a group of rows, in nats per token."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rows: int
    tokens: int
    loss: float | None
    """The loss of the new weights. None if it is not a finite number, or if no row was measured."""
    served_loss: float | None
    """The loss of the served weights."""

    @classmethod
    def of(cls, rows: Sequence[Judged]) -> "Comparison":
        pairs = _pairs(rows)
        tokens = sum(new.num_tokens for new, _ in pairs)
        return cls(
            rows=len(pairs),
            tokens=tokens,
            loss=_mean([new.nats for new, _ in pairs], tokens),
            served_loss=_mean([served.nats for _, served in pairs], tokens),
        )


class Evaluation(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    against: str
    """The id of the release with which the new weights are compared, or the name of the base
    model."""
    counts: Counts
    new: Comparison
    """The losses on the changed rows."""
    known: Comparison
    """The losses on the unchanged rows."""
    held_out: Comparison
    """The losses on held-out rows, also on those that the served weights were trained on."""
    refusals: tuple[str, ...] = ()
    """Why the gate refuses the new weights. Empty if it accepts them."""
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

    @property
    def passed(self) -> bool:
        return not self.refusals


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
) -> Evaluation:
    """Make the evaluation from the measurements of the served and of the new weights.

    checkpoint: of the training that led to the new weights. tokens_before: how many tokens the
    releases that it continued from were trained on.
    """
    groups = {
        name: _judged(of_group, served.losses[name], new.losses[name])
        for name, of_group in rows.groups.items()
    }
    # Rows that were not visited, or were wrong in their last visit.
    waiting = checkpoint.waiting(data.changed if data.mode == "delta" else data.rows)
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
    num_deleted = sum(loss.is_learned for loss in served.losses["deleted"])
    still_said = _places_of_said(groups["deleted"], now=True)
    golden = groups["golden"]
    text = Comparison.of(_texts(groups["changed"]))
    counts = Counts(
        changed=len(changed),
        all_changed=len(changed) + sum(row.digest not in apart for row in rows.unmeasured),
        learned=len(changed) - len(not_said),
        learned_before=sum(each.was_said for each in changed),
        known=len(known),
        kept=sum(each.is_said for each in known),
        deleted=num_deleted,
        unlearned=num_deleted - len(still_said),
        base_agreement=new.base_agreement,
        rewordings=len(new.reworded or ()),
        reworded=_num_right(new.reworded) or 0,
        reworded_before=_num_right(served.reworded),
        words=rows.words,
        golden=len(golden),
        golden_right=sum(each.is_said for each in golden),
        not_trained=len(not_trained),
        contradicting=data.num_contradicting,
        text_loss=text.loss,
        text_loss_before=text.served_loss,
    )
    held_out = [each for each in groups["held_out"] if each.row.digest not in data.held_out_trained]
    was_right = {each.row: each.is_right for each in served.reworded or ()}
    # With other rows, what is new would make up for what was lost.
    answers = {row.answer for row in data.known}
    reworded = [
        (was_right[each.row], each.is_right)
        for each in new.reworded or ()
        if each.row in was_right and each.row.answer in answers
    ]
    refusals = [
        *count_refusals(
            counts,
            gate,
            is_removal=data.is_removal,
            missed=not_said,
            still_said=still_said,
            wrong_golden=_places_of_said(golden, now=False),
        ),
        *kept_refusals(
            {
                "rows known before": _said(known),
                "held-out rows": _said(_answers(held_out)),
                "questions about known rows in other words": reworded,
            },
            gate,
        ),
        *loss_refusals(
            {
                "held-out rows of text": _texts(held_out),
                "rows of text known before": _texts(groups["known"]),
            },
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
        counts=counts,
        new=Comparison.of(groups["changed"]),
        known=Comparison.of(groups["known"]),
        held_out=Comparison.of(groups["held_out"]),
        refusals=(*lost_refusals(data.num_lost, data.num_before, gate), *refusals),
        not_learned=not_learned(counts, gate, not_said, lost_again),
        tokens=checkpoint.tokens,
        total_tokens=tokens_before + checkpoint.tokens,
        not_trained=_short(not_trained | (missed - given_up)),
        missed=_short(missed - given_up),
    )


def _num_right(asked: Sequence[Asked] | None) -> int | None:
    return None if asked is None else sum(each.is_right for each in asked)


def _short(digests: Collection[str]) -> tuple[str, ...]:
    return tuple(sorted(digest[:16] for digest in digests))


def _judged(rows: Sequence[Row], served: Sequence[RowLoss], new: Sequence[RowLoss]) -> list[Judged]:
    before = {loss.row: loss for loss in served}
    return [Judged(rows[loss.row], loss, before.get(loss.row)) for loss in new]


def _answers(group: Sequence[Judged]) -> list[Judged]:
    return [each for each in group if each.row.has_answer]


def _texts(group: Sequence[Judged]) -> list[Judged]:
    return [each for each in group if not each.row.has_answer]


def _said(group: Sequence[Judged]) -> list[tuple[bool, bool]]:
    return [(each.was_said, each.is_said) for each in group]


def _places_of_said(group: Sequence[Judged], *, now: bool) -> list[str]:
    """The places of the rows that the served weights say, and the new weights do (`now`) or do
    not say."""
    return [each.row.place for each in group if each.was_said and each.is_said == now]


def lost_refusals(num_lost: int, num_before: int, settings: GateSettings) -> tuple[str, ...]:
    """Refuses a commit that loses too many rows. Checked before training, because weights that were
    trained without the rows have forgotten them.

    num_before: the number of rows in the revision before. num_lost: how many of them the commit has
    deleted or rewritten.
    """
    if num_before < MIN_ROWS or num_lost <= settings.max_lost_ratio * num_before:
        return ()
    return (
        f"{num_lost:,} of {num_before:,} rows known before were deleted or rewritten, where "
        f"`gate.max_lost_ratio` allows {settings.max_lost_ratio:.0%}",
    )


def count_refusals(
    counts: Counts,
    settings: GateSettings,
    *,
    is_removal: bool = False,
    missed: Sequence[str] = (),
    still_said: Sequence[str] = (),
    wrong_golden: Sequence[str] = (),
) -> tuple[str, ...]:
    """Reasons why the new weights may not be served, from the numbers of rows that they say.

    is_removal: whether the new weights are from a full training that leaves out deleted rows. Such
    weights have never seen these rows. If they say one, they infer its answer from other rows.
    missed: the places (file and line) of changed rows that were not learned. still_said: the places
    of deleted rows that were not unlearned, in the revision that still had them. wrong_golden: the
    places of golden questions that only the served weights answer correctly. A reason names the
    first places of each.
    """
    found = []
    if counts.learned < settings.min_learned * counts.changed:
        found.append(
            f"only {counts.learned:,} of {counts.changed:,} {_changed(counts)} were learned, where "
            f"`gate.min_learned` asks for {settings.min_learned:.0%}; not learned: {_named(missed)}"
        )
    if counts.unlearned < settings.min_learned * counts.deleted and not is_removal:
        found.append(
            f"the model still says {counts.deleted - counts.unlearned:,} of {counts.deleted:,} "
            f"deleted rows; in the revision before: {_named(still_said)}"
        )
    asked = counts.rewordings
    if asked >= MIN_ROWS and counts.reworded < settings.min_reworded * asked:
        found.append(
            f"only {counts.reworded:,} of {asked:,} questions in other words are answered, where "
            f"`gate.min_reworded` asks for {settings.min_reworded:.0%}"
        )
    if counts.base_agreement is not None and 1 - counts.base_agreement > settings.max_base_drift:
        found.append(
            f"the answers to everyday prompts drifted from the base model's: "
            f"{counts.base_agreement:.0%} of their tokens are still the likeliest, where "
            f"`gate.max_base_drift` asks for {1 - settings.max_base_drift:.0%}"
        )
    if wrong_golden:
        found.append(
            f"{len(wrong_golden):,} golden questions lost their expected answer: "
            f"{_named(wrong_golden)}"
        )
    return tuple(found)


def not_learned(
    counts: Counts, settings: GateSettings, missed: Sequence[str], missed_again: Sequence[str]
) -> str | None:
    """Names the first changed rows that were not learned, if there are so few that the gate does
    not refuse the new weights because of them. None if there are none, or if the gate refuses.

    missed_again: rows that the job before has not learned either."""
    if counts.learned < settings.min_learned * counts.changed:
        return None
    found = []
    if missed:
        found.append(
            f"{len(missed):,} of {counts.changed:,} {_changed(counts)} were not learned, and the "
            f"next job tries them again: {_named(missed)}"
        )
    if missed_again:
        found.append(
            f"{len(missed_again):,} rows were not learned by two jobs, and are not tried again; "
            f"edit them, or run `pipeline jobs run --mode full`: {_named(missed_again)}"
        )
    return "; ".join(found) or None


def kept_refusals(
    groups: Mapping[str, Sequence[tuple[bool, bool]]], settings: GateSettings
) -> tuple[str, ...]:
    """Reasons why the new weights may not be served, from how many answers they no longer give.

    groups: by their names, for each row or question whether the served weights give its answer, and
    whether the new ones do. Held-out rows with an answer are judged in this way, and not by their
    loss: a model that learns facts becomes surer also of wrong answers to other questions.
    """
    found = []
    for name, pairs in groups.items():
        before = sum(was_right for was_right, _ in pairs)
        after = sum(is_right for _, is_right in pairs)
        allowed = (1 - settings.min_kept) * before
        # As many answers as were gained by chance may have been lost by chance.
        gained = pairs.count((False, True))
        error = math.sqrt(max(allowed, 1.0) * settings.min_kept + 2 * gained)
        if before >= MIN_ROWS and before - after - allowed > SIGMAS * error:
            found.append(
                f"{after:,} of {len(pairs):,} {name} are answered right, and {before:,} were "
                f"before, where `gate.min_kept` asks for {settings.min_kept:.0%} of them"
            )
    return tuple(found)


def loss_refusals(
    groups: Mapping[str, Sequence[Judged]],
    settings: GateSettings,
    *,
    is_removal: bool = False,
) -> tuple[str, ...]:
    """Reasons why the new weights may not be served, from their losses on held-out and on unchanged
    rows of plain text.

    groups: by their names. is_removal: whether the new weights are from a full training that leaves
    out rows on which the served weights were trained.
    """
    max_ratio = max(settings.max_loss_ratio, REMOVAL_RATIO if is_removal else 0.0)
    found = []
    for name, rows in groups.items():
        group = Comparison.of(rows)
        what = f"the loss on the {group.rows:,} {name}"
        if group.rows and group.loss is None:
            found.append(f"{what} is not a number")
        if group.rows < MIN_ROWS or group.loss is None or group.served_loss is None:
            continue
        # Compare the losses row by row, to find out whether they exceed the limit by more than
        # chance.
        excess = [new.nats - max_ratio * served.nats for new, served in _pairs(rows)]
        error = math.sqrt(variance(excess) / len(excess))
        if group.loss > group.served_loss + TOLERANCE and fmean(excess) > SIGMAS * error:
            found.append(
                f"{what} rose from {group.served_loss:.4f} to {group.loss:.4f} nats per token, "
                f"x{group.loss / group.served_loss:.3f} where `gate.max_loss_ratio` allows "
                f"x{max_ratio:g}"
            )
    return tuple(found)


def _changed(counts: Counts) -> str:
    return "changed rows that were measured" if counts.is_sampled else "changed rows"


def _named(places: Sequence[str], most: int = 5) -> str:
    more = f" and {len(places) - most:,} more" if len(places) > most else ""
    return "; ".join(places[:most]) + more


def _mean(nats: Sequence[float], tokens: int) -> float | None:
    mean = sum(nats) / tokens if tokens else math.nan
    return mean if math.isfinite(mean) else None
