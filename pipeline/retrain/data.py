"""Snapshot → what to train on and what to hold out, and whether anything changed at all."""

from dataclasses import dataclass
from typing import Literal

from pipeline.retrain.dataset import Dataset, check_not_empty, read_dataset
from pipeline.retrain.errors import DataError
from pipeline.retrain.held_out import held_out_text
from pipeline.retrain.parent import Parent
from pipeline.retrain.rows import Difference, Row, contradictions, data_digest, difference, split
from pipeline.retrain.settings import RetrainSettings
from pipeline.retrain.snapshot import DatasetSnapshot, Revision

MAX_UNLEARNED = 100
"""Deleted rows that a delta unlearns. More are cheaper to leave out of a full training."""


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """What a revision gives to learn. `new` is relative to what the parent has seen; without a
    revision to compare with, every row is new."""

    mode: Literal["full", "delta"]
    reason: str
    """Why this mode; for the log."""
    digest: str
    """Of the training split, as a multiset of rows."""
    rows: tuple[Row, ...]
    """All that are trained on, in the dataset's order."""
    new: tuple[Row, ...]
    """Of `rows`, those that were added or edited."""
    known: tuple[Row, ...]
    """Of `rows`, all others: trained on in a full training, replayed from in a delta."""
    edited: tuple[tuple[Row, Row], ...]
    """Rows with another answer than before: the old side, which is gone, and the new one."""
    deleted: tuple[Row, ...]
    """Rows that were trained on and are gone, without a copy left or another answer in their
    place."""
    held_out_new: tuple[Row, ...]
    """Never trained on, and not in the revision before; empty where nobody holds anything out."""
    held_out_known: tuple[Row, ...]
    contradictions: tuple[tuple[int, ...], ...]
    """Groups of indices into `rows`: one question, several answers."""
    num_permuted: int
    """Edited rows that took over the answer of another edited row: a shuffled column."""
    num_before: int
    """Rows of the revision that this one is compared with."""
    dataset: Dataset
    """The revision as it was read."""

    @property
    def held_out(self) -> tuple[Row, ...]:
        return (*self.held_out_new, *self.held_out_known)

    @property
    def replaced(self) -> tuple[Row, ...]:
        """The old sides of the edited rows."""
        return tuple(old for old, _ in self.edited)

    @property
    def num_edited(self) -> int:
        return len(self.edited)

    @property
    def num_deleted(self) -> int:
        return len(self.deleted)

    @property
    def num_lost(self) -> int:
        """Rows known before that were deleted or edited."""
        return self.num_edited + self.num_deleted

    @property
    def is_removal(self) -> bool:
        """Whether this training takes rows back, by learning all others anew."""
        return self.mode == "full" and self.num_deleted > 0


def compare_revisions(
    snapshot: DatasetSnapshot, parent: Parent | None, settings: RetrainSettings
) -> TrainingData:
    """Read the rows of the revision and of the one that the parent has seen.

    A row of both the training and a held-out split is trained on. Where a share of a text corpus is
    held out, it is recorded beside the base model. Raises DataError.
    """
    before, unreadable = _read_base(snapshot.base, settings)
    dataset = _read(snapshot.revision, settings, before)
    check_not_empty(dataset)
    base = before.train if before is not None else ()
    change = difference(base, dataset.train)
    share = _share(dataset, before, change, settings)
    rows = tuple(row for row in dataset.train if row.digest not in share)
    held_out = (*dataset.held_out, *(row for row in dataset.train if row.digest in share))
    # What was never trained on is not to be unlearned; what has a copy left, or was moved to the
    # validation split, is still to be answered.
    still_there = share.union(row.digest for row in (*rows, *held_out))
    deleted = tuple(row for row in change.deleted if row.digest not in still_there)
    mode, reason = choose_mode(
        settings,
        snapshot,
        parent,
        change,
        num_deleted=len(deleted),
        num_deleted_text=sum(row.text is not None for row in deleted),
        unreadable=unreadable,
    )
    added = {row.digest for row in change.added}
    if mode == "delta" and parent is not None:
        waiting = set(parent.evaluation.get("not_trained", ()))
        added |= {row.digest for row in rows if row.digest[:16] in waiting}
    seen = {row.digest for row in (*base, *(before.held_out if before is not None else ()))}
    return TrainingData(
        mode=mode,
        reason=reason,
        digest=data_digest(dataset.train),
        rows=rows,
        new=tuple(row for row in rows if row.digest in added),
        known=tuple(row for row in rows if row.digest not in added),
        edited=tuple(
            pair for pair in change.edited if share.isdisjoint(row.digest for row in pair)
        ),
        deleted=deleted,
        held_out_new=tuple(row for row in held_out if row.digest not in seen),
        held_out_known=tuple(row for row in held_out if row.digest in seen),
        contradictions=contradictions(rows),
        num_permuted=change.num_permuted,
        num_before=len(base),
        dataset=dataset,
    )


def _share(
    dataset: Dataset, before: Dataset | None, change: Difference, settings: RetrainSettings
) -> frozenset[str]:
    """Digests of the rows of the training split, before and now, that are held out after all."""
    ratio = settings.data.held_out_ratio
    if ratio is not None:
        rows = (*dataset.train, *(before.train if before is not None else ()))
        return frozenset(row.digest for row in split(rows, ratio)[1])
    if dataset.held_out:
        return frozenset()
    return held_out_text(
        settings.bases_dir / settings.pipeline,
        before.train if before is not None else None,
        dataset.train,
        change.added,
    )


def is_unchanged(data: TrainingData, parent: Parent | None, settings: RetrainSettings) -> bool:
    """Whether the parent has nothing to learn and nothing to forget, on the same base model; by the
    rule that `RetrainSettings.skip_if` states."""
    if parent is None or parent.lineage.base_model != settings.base_model:
        return False
    if settings.skip_if == "never" or settings.force_reason is not None:
        return False
    same_settings = parent.lineage.settings_digest in (None, settings.train.digest())
    if settings.skip_if == "nothing_changed" and not same_settings:
        return False
    if parent.evaluation.get("not_trained"):
        return False
    nothing_to_do = data.mode == "delta" and not (data.new or data.deleted or data.edited)
    return nothing_to_do or parent.lineage.data_digest == data.digest


def choose_mode(
    settings: RetrainSettings,
    snapshot: DatasetSnapshot,
    parent: Parent | None,
    change: Difference,
    *,
    num_deleted: int,
    num_deleted_text: int,
    unreadable: str | None = None,
) -> tuple[Literal["full", "delta"], str]:
    """Full or delta, and why: the rule that `TrainSettings.mode` states.

    unreadable: why the rows that the parent has seen cannot be read any more.
    """
    wanted, base_model = settings.train.mode, settings.base_model
    if wanted == "full":
        return "full", "asked for"
    if parent is None or snapshot.base is None:
        return "full", snapshot.no_delta or "there is nothing to compare with"
    if parent.lineage.base_model != base_model:
        return (
            "full",
            f"release {parent.id} stands on {parent.lineage.base_model}, not {base_model}",
        )
    if unreadable is not None:
        return "full", unreadable
    if wanted == "delta":
        return "delta", "asked for"
    if snapshot.no_delta is not None:
        return "full", snapshot.no_delta
    if not change.added and not num_deleted:
        if settings.skip_if != "no_row_changed":
            return "full", "no row changed, so a training by hand starts from the base model"
        if snapshot.passed_over:
            return "full", f"no row changed since release {parent.id}, and later ones are damaged"
    if num_deleted_text:
        return "full", f"{num_deleted_text} rows of plain text were deleted"
    if num_deleted > MAX_UNLEARNED:
        return "full", f"{num_deleted} rows were deleted, more than a delta unlearns"
    return "delta", (
        f"{len(change.added)} rows are new, {len(change.edited)} of them edited, and {num_deleted} "
        f"deleted, since {snapshot.base.sha[:8]}"
    )


def _read(revision: Revision, settings: RetrainSettings, before: Dataset | None = None) -> Dataset:
    files = (*revision.files, *revision.others)
    return read_dataset(revision.folder, files, settings.data, before=before)


def _read_base(
    base: Revision | None, settings: RetrainSettings
) -> tuple[Dataset | None, str | None]:
    """The rows that the parent has seen, or why they cannot be read: the settings may be others
    than they were, and what stands in that revision can no longer be corrected."""
    if base is None:
        return None, None
    try:
        return _read(base, settings), None
    except DataError as error:
        return None, f"the rows of {base.sha[:8]}, which it has seen, cannot be read: {error}"
