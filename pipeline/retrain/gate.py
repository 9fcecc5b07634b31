"""May the new weights be served? A verdict on counts and losses that were measured elsewhere."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict

from jobs.counts import Counts
from pipeline.retrain.settings import GateSettings

MIN_ROWS = 20
"""Fewer known rows than this are never held against a release: a few rows prove nothing."""
SIGMAS = 2.0
"""How far beyond what is allowed a count or a loss must be, in standard errors: less may be the
luck of which rows were measured."""
TOLERANCE = 0.01
"""Nats per token. A loss that is higher by less than this is never held against a release: of two
models that both know a row by heart, one is easily 2 % better at nothing."""
NOISY = 0.25
"""Share of rows of noise for which neither the served weights nor the other rows prefer their order
to a random one: two coins that both fall on one side."""
REMOVAL_RATIO = 1.15
"""A loss may be this many times the served release's after a full training without deleted rows:
that what was deleted is not served any more matters more than what many deltas had gained."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """One row under both models."""

    new_nats: float
    """-log p of all its learned tokens, under the new weights."""
    served_nats: float
    """The same under what is served now."""
    num_tokens: int


class Comparison(BaseModel):
    """A group of rows. Losses are nats per token."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rows: int
    tokens: int
    loss: float | None
    """None where it is not a number, or no row was measured."""
    served_loss: float | None

    @classmethod
    def of(cls, pairs: Sequence[Pair]) -> "Comparison":
        tokens = sum(pair.num_tokens for pair in pairs)
        return cls(
            rows=len(pairs),
            tokens=tokens,
            loss=_mean([pair.new_nats for pair in pairs], tokens),
            served_loss=_mean([pair.served_nats for pair in pairs], tokens),
        )


class Noise(BaseModel):
    """How many rows of a group look like noise: neither the served weights nor the other rows find
    them likelier than the same tokens in random order."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    noisy: int
    rows: int
    """Rows that could be judged: long enough to tell."""

    @property
    def share(self) -> float:
        """Of rows that are noise, one in `1 / NOISY` of which looks it."""
        return min(1.0, self.noisy / NOISY / self.rows) if self.rows else 0.0


def data_refusals(
    num_lost: int, num_before: int, new: Noise, known: Noise, settings: GateSettings
) -> tuple[str, ...]:
    """Why nobody should learn from these rows; decided before training, since weights that were
    trained on noise know it, and rows that are gone cannot speak for themselves.

    num_lost: of `num_before` rows, those that the commit deleted or rewrote. new: changed rows.
    known: rows known before. Where the served weights find no order in these either, or there are
    too few, nothing can be told.
    """
    found = []
    if num_lost > settings.max_lost_ratio * num_before:
        found.append(
            f"{num_lost:,} of {num_before:,} rows known before were deleted or rewritten, where "
            f"`gate.max_lost_ratio` allows {settings.max_lost_ratio:.0%}"
        )
    allowed = known.share + settings.max_noise_ratio
    if min(new.rows, known.rows) >= MIN_ROWS and new.share > allowed:
        # Only some rows of noise look it, so the error is that of their smaller share.
        looking = min(1.0, NOISY * allowed)
        error = math.sqrt(looking * (1 - looking) / new.rows) / NOISY
        if new.share - allowed > error:
            found.append(
                f"about {new.share:.0%} of the {new.rows:,} changed rows that are long enough to "
                "tell are noise: the served weights find them no likelier than their tokens in "
                f"random order; `gate.max_noise_ratio` allows {settings.max_noise_ratio:.0%}"
            )
    return tuple(found)


def count_refusals(
    counts: Counts,
    settings: GateSettings,
    *,
    missed: Sequence[str] = (),
    still_said: Sequence[str] = (),
    wrong_golden: Sequence[str] = (),
) -> tuple[str, ...]:
    """Why the new weights may not be served, by the rows that they say.

    missed, still_said, wrong_golden: where the rows stand that were not learned, not unlearned, and
    the golden questions that only the served weights answer; the first of each are named.
    """
    found = []
    if counts.learned < settings.min_learned * counts.changed:
        found.append(
            f"only {counts.learned:,} of {counts.changed:,} changed rows were learned, where "
            f"`gate.min_learned` asks for {settings.min_learned:.0%}; not learned: {_named(missed)}"
        )
    if counts.unlearned < settings.min_learned * counts.deleted:
        found.append(
            f"the model still says {counts.deleted - counts.unlearned:,} of {counts.deleted:,} "
            f"deleted rows: {_named(still_said)}"
        )
    lost = counts.known - counts.kept
    allowed = (1 - settings.min_kept) * counts.known
    if counts.known >= MIN_ROWS and lost - allowed > SIGMAS * math.sqrt(
        max(allowed, 1.0) * settings.min_kept
    ):
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


def loss_refusals(
    groups: Sequence[tuple[str, Sequence[Pair]]],
    settings: GateSettings,
    *,
    is_removal: bool = False,
) -> tuple[str, ...]:
    """Why the new weights may not be served, by losses on held-out rows and on known text.

    groups: what the rows of each are called, and the rows. is_removal: the new weights were trained
    from the base model on, without rows that the served ones have learned.
    """
    ratio = max(settings.max_loss_ratio, REMOVAL_RATIO if is_removal else 0.0)
    found = (_refusal(name, pairs, ratio) for name, pairs in groups if pairs)
    return tuple(reason for reason in found if reason is not None)


def _refusal(name: str, pairs: Sequence[Pair], max_ratio: float) -> str | None:
    group = Comparison.of(pairs)
    rows = f"the {group.rows:,} {name}"
    if group.loss is None:
        return f"the loss on {rows} is not a number"
    if len(pairs) < MIN_ROWS or group.served_loss is None:
        return None
    if group.loss <= max(group.served_loss * max_ratio, group.served_loss + TOLERANCE):
        return None
    # Paired, row by row: how much of the excess could be the luck of which rows were measured?
    excess = [pair.new_nats - max_ratio * pair.served_nats for pair in pairs]
    mean = sum(excess) / len(excess)
    variance = sum((each - mean) ** 2 for each in excess) / (len(excess) - 1)
    if mean <= SIGMAS * math.sqrt(variance / len(excess)):
        return None
    return (
        f"the loss on {rows} rose from {group.served_loss:.4f} to {group.loss:.4f} nats per token, "
        f"x{group.loss / group.served_loss:.3f} where `gate.max_loss_ratio` allows x{max_ratio:g}"
    )


def _named(places: Sequence[str], most: int = 5) -> str:
    more = f" and {len(places) - most:,} more" if len(places) > most else ""
    return "; ".join(places[:most]) + more


def _mean(nats: Sequence[float], tokens: int) -> float | None:
    mean = sum(nats) / tokens if tokens else math.nan
    return mean if math.isfinite(mean) else None
