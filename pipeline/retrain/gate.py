"""The gate: decides whether the new weights may be served. It judges counts and losses that other
modules have measured.

Weights *say* a row if a model with these weights gives the row's answer. A row is *learned* if the
new weights say it, and *kept* if they still say it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict

from jobs.counts import Counts
from pipeline.retrain.settings import GateSettings

MIN_ROWS = 20
"""The checks of deleted rows, of unchanged rows, of held-out rows and of losses need at
least this many rows, because a few rows prove nothing."""
SIGMAS = 2.0
"""A count or a loss must exceed its limit by this many standard errors before the gate refuses. A
smaller excess may be chance, because only a sample of the rows was measured."""
TOLERANCE = 0.01
"""Nats per token. The gate ignores a rise of the loss that is smaller than this. If two models both
know a row by heart, both losses are almost 0, and their ratio means nothing."""
REMOVAL_RATIO = 1.15
"""After a full training that leaves out deleted rows, a loss may be this many times the loss of the
served release. Many deltas may have made the served release better than one full training can. But
it is more important that the deleted rows are no longer served."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """The losses of one row under the new and under the served weights."""

    new_nats: float
    """The sum of -log p of the row's learned tokens, under the new weights."""
    served_nats: float
    """This sum under the served weights."""
    num_tokens: int


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
    def of(cls, pairs: Sequence[Pair]) -> "Comparison":
        tokens = sum(pair.num_tokens for pair in pairs)
        return cls(
            rows=len(pairs),
            tokens=tokens,
            loss=_mean([pair.new_nats for pair in pairs], tokens),
            served_loss=_mean([pair.served_nats for pair in pairs], tokens),
        )


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
    if _is_lost(counts.known, counts.kept, settings.min_kept):
        found.append(
            f"only {counts.kept:,} of {counts.known:,} rows known before were kept, where "
            f"`gate.min_kept` asks for {settings.min_kept:.0%}"
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


def is_short(counts: Counts, settings: GateSettings, *, is_removal: bool) -> bool:
    """Whether too few rows were learned or unlearned. Another round may then succeed."""
    return counts.learned < settings.min_learned * counts.changed or (
        counts.unlearned < settings.min_learned * counts.deleted and not is_removal
    )


def held_out_refusals(
    before: Sequence[bool], after: Sequence[bool], settings: GateSettings
) -> tuple[str, ...]:
    """Reasons why the new weights may not be served, from held-out rows that have an answer: for
    each row, whether the served weights say it, and whether the new weights say it.

    Only the numbers of these rows are compared. Their loss says little: a model that learns facts
    becomes surer of its answers, also of wrong answers to questions that it was never trained on.
    """
    if not _is_lost(sum(before), sum(after), settings.min_kept):
        return ()
    return (
        f"{sum(after):,} of {len(after):,} held-out rows are answered right, and {sum(before):,} "
        f"were before, where `gate.min_kept` asks for {settings.min_kept:.0%} of them",
    )


def loss_refusals(
    groups: Sequence[tuple[str, Sequence[Pair]]],
    settings: GateSettings,
    *,
    is_removal: bool = False,
) -> tuple[str, ...]:
    """Reasons why the new weights may not be served, from their losses on held-out and on unchanged
    rows of plain text.

    groups: for each group of rows, its name and the losses of its rows. is_removal: whether the new
    weights are from a full training that leaves out deleted rows.
    """
    ratio = max(settings.max_loss_ratio, REMOVAL_RATIO if is_removal else 0.0)
    found = (_refusal(name, pairs, ratio) for name, pairs in groups if pairs)
    return tuple(reason for reason in found if reason is not None)


def _is_lost(before: int, after: int, least: float) -> bool:
    """Whether `after` is below the share `least` of `before` by more than chance explains."""
    allowed = (1 - least) * before
    error = math.sqrt(max(allowed, 1.0) * least)
    return before >= MIN_ROWS and before - after - allowed > SIGMAS * error


def _refusal(name: str, pairs: Sequence[Pair], max_ratio: float) -> str | None:
    group = Comparison.of(pairs)
    rows = f"the {group.rows:,} {name}"
    if group.loss is None:
        return f"the loss on {rows} is not a number"
    if len(pairs) < MIN_ROWS or group.served_loss is None:
        return None
    if group.loss <= group.served_loss + TOLERANCE:
        return None
    # Compare the losses row by row, to find out whether they exceed the limit by more than chance.
    excess = [pair.new_nats - max_ratio * pair.served_nats for pair in pairs]
    mean = sum(excess) / len(excess)
    variance = sum((each - mean) ** 2 for each in excess) / (len(excess) - 1)
    if mean <= SIGMAS * math.sqrt(variance / len(excess)):
        return None
    return (
        f"the loss on {rows} rose from {group.served_loss:.4f} to {group.loss:.4f} nats per token, "
        f"x{group.loss / group.served_loss:.3f} where `gate.max_loss_ratio` allows x{max_ratio:g}"
    )


def _changed(counts: Counts) -> str:
    return "changed rows that were measured" if counts.is_sampled else "changed rows"


def _named(places: Sequence[str], most: int = 5) -> str:
    more = f" and {len(places) - most:,} more" if len(places) > most else ""
    return "; ".join(places[:most]) + more


def _mean(nats: Sequence[float], tokens: int) -> float | None:
    mean = sum(nats) / tokens if tokens else math.nan
    return mean if math.isfinite(mean) else None
