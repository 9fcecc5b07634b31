"""May the new weights be served? A verdict on losses that were measured elsewhere."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict

from pipeline.retrain.settings import GateSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """One held-out row under both models."""

    new_nats: float
    """-log p of all its learned tokens, under the new weights."""
    served_nats: float
    """The same under what is served now."""
    num_tokens: int


class Comparison(BaseModel):
    """A group of held-out rows. Losses are nats per token."""

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
    """How many rows of a group a model that was not trained on them finds no likelier than the same
    tokens in random order."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    noisy: int
    rows: int
    """That could be told: with at least two tokens to swap."""

    @property
    def share(self) -> float:
        return self.noisy / self.rows if self.rows else 0.0


def refusals_by_loss(
    new: Sequence[Pair],
    known: Sequence[Pair],
    settings: GateSettings,
    *,
    is_removal: bool = False,
) -> tuple[str, ...]:
    """Why the new weights may not be served, each with its numbers; empty when they may.

    new, known: held-out rows of the new range, and those known before. is_removal: the new weights
    were trained from the base model on, without rows that the served ones have learned.
    """
    least = settings.max_removal_ratio if is_removal else 0.0
    max_new_ratio = max(settings.max_new_ratio, least)
    max_old_ratio = max(settings.max_old_ratio, least)
    if not new and not known:
        return ("no held-out row was measured",)
    if min(len(new), len(known)) >= settings.min_rows:
        groups = [
            ("of the new range", new, max_new_ratio),
            ("known before", known, max_old_ratio),
        ]
    elif not known:
        groups = [("of the new range", new, max_new_ratio)]
    elif not new:
        groups = [("known before", known, max_old_ratio)]
    else:
        ratio = max(max_new_ratio, max_old_ratio)
        groups = [("new and known", [*new, *known], ratio)]
    found = (_refusal(name, pairs, ratio, settings) for name, pairs, ratio in groups)
    return tuple(reason for reason in found if reason is not None)


def are_too_few(new: Noise, known: Noise, settings: GateSettings) -> bool:
    """Whether held-out rows of the new range look like noise, and are too few to refuse on."""
    looks_noisy = new.share > known.share + settings.max_noise_ratio
    return looks_noisy and new.rows < settings.min_rows


def refusals_by_rows(
    num_lost: int, num_before: int, new: Noise, known: Noise, settings: GateSettings
) -> tuple[str, ...]:
    """Why nobody should learn from these rows, whatever the losses say: on rows that replaced the
    old ones, new weights always look better than those that learned the old ones.

    num_lost: of `num_before` rows, those that the commit deleted or rewrote. new: rows of the new
    range, held out or, where these are too few, all. known: held-out rows known before.
    """
    found = []
    if num_lost > settings.max_lost_ratio * num_before:
        found.append(
            f"{num_lost} of {num_before} rows known before were deleted or rewritten, where "
            f"`gate.max_lost_ratio` allows {settings.max_lost_ratio:.0%}"
        )
    if min(new.rows, known.rows) >= settings.min_rows:
        excess = new.share - known.share - settings.max_noise_ratio
        pooled = (new.noisy + known.noisy) / (new.rows + known.rows)
        error = math.sqrt(pooled * (1 - pooled) * (1 / new.rows + 1 / known.rows))
        if excess > settings.sigmas * error:
            found.append(
                f"{new.noisy} of {new.rows} rows of the new range are noise: no likelier than "
                f"their tokens in random order (known before: {known.noisy} of {known.rows})"
            )
    return tuple(found)


def _refusal(
    name: str, pairs: Sequence[Pair], max_ratio: float, settings: GateSettings
) -> str | None:
    group = Comparison.of(pairs)
    rows = f"the {group.rows} held-out rows {name}"
    if group.loss is None:
        return f"the loss on {rows} is not a number"
    if group.served_loss is None or group.loss <= group.served_loss * max_ratio:
        return None
    if group.loss - group.served_loss <= settings.tolerance:
        return None
    # Paired, row by row: how much of the excess could be the luck of which rows were held out?
    excess = [pair.new_nats - max_ratio * pair.served_nats for pair in pairs]
    if len(excess) > 1:
        mean = sum(excess) / len(excess)
        variance = sum((each - mean) ** 2 for each in excess) / (len(excess) - 1)
        if mean <= settings.sigmas * math.sqrt(variance / len(excess)):
            return None
    return (
        f"the loss on {rows} rose from {group.served_loss:.4f} to {group.loss:.4f} nats per token, "
        f"x{group.loss / group.served_loss:.3f} where x{max_ratio:g} is allowed"
    )


def _mean(nats: Sequence[float], tokens: int) -> float | None:
    mean = sum(nats) / tokens if tokens else math.nan
    return mean if math.isfinite(mean) else None
