"""`Evaluation`: the new weights and the served ones on the same held-out rows, and the verdict."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from pipeline.retrain.gate import Comparison, Noise, Pair, refusals_by_loss, refusals_by_rows
from pipeline.retrain.settings import GateSettings

if TYPE_CHECKING:
    from pipeline.retrain.scoring import RowLoss


class Evaluation(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    against: str
    """The id of the release that the new weights were measured against, or the base model."""
    new: Comparison
    """Held-out rows of the new range."""
    known: Comparison
    """Held-out rows that were known before."""
    new_noise: Noise
    known_noise: Noise
    refusals: tuple[str, ...] = ()
    """Why the gate would not let them pass; empty when it does."""
    tokens: int
    """That were trained on."""
    total_tokens: int
    """The same, of all releases from the base model on."""

    @property
    def passed(self) -> bool:
        return not self.refusals


def compare(
    new: tuple[Sequence["RowLoss"], Sequence["RowLoss"]],
    served: tuple[Sequence["RowLoss"], Sequence["RowLoss"]],
    noise: tuple[Noise, Noise],
    gate: GateSettings,
    *,
    num_lost: int,
    num_before: int,
    is_removal: bool,
    against: str,
    tokens: int,
    tokens_before: int,
) -> Evaluation:
    """new, served: losses on the rows of the new range, and on those known before; noise: in both.

    num_lost: of `num_before` rows, those that the commit deleted or rewrote. is_removal:
    whether they were trained without rows that the served ones have learned.
    """
    pairs = [_pairs(*groups) for groups in zip(new, served, strict=True)]
    return Evaluation(
        against=against,
        new=Comparison.of(pairs[0]),
        known=Comparison.of(pairs[1]),
        new_noise=noise[0],
        known_noise=noise[1],
        refusals=(
            *refusals_by_loss(pairs[0], pairs[1], gate, is_removal=is_removal),
            *refusals_by_rows(num_lost, num_before, *noise, gate),
        ),
        tokens=tokens,
        total_tokens=tokens_before + tokens,
    )


def _pairs(new: Sequence["RowLoss"], served: Sequence["RowLoss"]) -> list[Pair]:
    """Nats of whole rows compare even where the two models cut them into different tokens."""
    by_row = {loss.row: loss.nats for loss in served}
    return [
        Pair(new_nats=loss.nats, served_nats=by_row[loss.row], num_tokens=loss.num_tokens)
        for loss in new
        if loss.row in by_row
    ]
