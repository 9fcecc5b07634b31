"""Snapshot → what to train on and what to hold out, and whether anything changed at all."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pipeline.retrain.parent import Parent
from pipeline.retrain.reading import read_rows
from pipeline.retrain.rows import Difference, Row, data_digest, difference, split
from pipeline.retrain.settings import TrainSettings
from pipeline.retrain.snapshot import DatasetSnapshot, Revision


@dataclass(frozen=True, kw_only=True)
class Data:
    """The rows of a revision, sorted out. `new` is relative to what the parent has seen; without a
    revision to compare with, every row is new."""

    mode: Literal["full", "delta"]
    reason: str
    """Why this mode; for the log."""
    digest: str
    """Of all rows as a multiset."""
    rows: tuple[Row, ...]
    """All of them, in the dataset's order."""
    new: tuple[Row, ...]
    """To train on."""
    known: tuple[Row, ...]
    """To train on in a full training, to replay from in a delta."""
    held_out_new: tuple[Row, ...]
    held_out_known: tuple[Row, ...]
    num_before: int
    """Rows of the revision that this one is compared with."""
    num_lost: int
    """Of these, the ones that were deleted or edited."""
    num_deleted: int
    """Of these, the ones that were deleted."""

    @property
    def is_removal(self) -> bool:
        """Whether this training takes rows back, by learning all others anew."""
        return self.mode == "full" and self.num_deleted > 0


def sort_out(
    snapshot: DatasetSnapshot, parent: Parent | None, base_model: str, settings: TrainSettings
) -> Data:
    """Read the rows and decide. Raises DataError."""
    rows = _read(snapshot.revision, settings)
    before = _read_base(snapshot.base, settings)
    change = difference(before, rows)
    mode, reason = choose_mode(settings.mode, snapshot, parent, base_model, change)
    training, held_out = split(rows, settings.held_out_ratio, settings.min_held_out_rows)
    added = {row.digest for row in change.added}
    # Too few rows to hold one out: judged on what is trained on.
    judged = held_out or training
    return Data(
        mode=mode,
        reason=reason,
        digest=data_digest(rows),
        rows=tuple(rows),
        new=tuple(row for row in training if row.digest in added),
        known=tuple(row for row in training if row.digest not in added),
        held_out_new=tuple(row for row in judged if row.digest in added),
        held_out_known=tuple(row for row in judged if row.digest not in added),
        num_before=len(before),
        num_lost=change.num_edited + change.num_deleted,
        num_deleted=change.num_deleted,
    )


def is_unchanged(data: Data, parent: Parent | None, base_model: str) -> bool:
    """Whether the parent has seen exactly these rows, on the same base model."""
    return (
        parent is not None
        and parent.lineage.data_digest == data.digest
        and parent.lineage.base_model == base_model
    )


def choose_mode(
    wanted: Literal["auto", "delta", "full"],
    snapshot: DatasetSnapshot,
    parent: Parent | None,
    base_model: str,
    change: Difference,
) -> tuple[Literal["full", "delta"], str]:
    """Full or delta, and why: the rule that `TrainSettings.mode` states."""
    if wanted == "full":
        return "full", "asked for"
    if parent is None or snapshot.base is None:
        return "full", snapshot.no_delta or "there is nothing to compare with"
    if parent.lineage.base_model != base_model:
        return (
            "full",
            f"release {parent.id} stands on {parent.lineage.base_model}, not {base_model}",
        )
    if wanted == "delta":
        return "delta", "asked for"
    if snapshot.no_delta is not None:
        return "full", snapshot.no_delta
    if change.num_deleted:
        return "full", f"{change.num_deleted} rows were deleted"
    return "delta", (
        f"{len(change.added)} rows are new, {change.num_edited} of them edited, since "
        f"{snapshot.base.sha[:8]}"
    )


def _read(revision: Revision, settings: TrainSettings) -> list[Row]:
    return read_rows(revision.folder, revision.files, settings.max_row_bytes)


def _read_base(base: Revision | None, settings: TrainSettings) -> Sequence[Row]:
    return () if base is None else _read(base, settings)
