"""What a job starts from: the release from which it continues (`Parent`), and the dataset revision
to train on with the one to compare it with, both downloaded (`DatasetSnapshot`)."""

import logging
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from jobs.errors import is_temporary
from pipeline.retrain.dataset import is_needed
from pipeline.retrain.errors import HubAway, SnapshotError
from pipeline.retrain.sources import DatasetHub, GitDataset, Revision
from serving.weights.release import Lineage
from serving.weights.release_store import (
    live_releases,
    load_release,
    pending_release,
    release_number,
    served_release,
    stood_in_for,
)
from serving.weights.verify import verify_release

logger = logging.getLogger(__name__)

PATIENCE_SECONDS = 60.0
"""How long to keep asking if the hub does not answer. A hub that was killed and restarted answers
again within this time."""
RETRY_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class Parent:
    id: str
    folder: Path
    lineage: Lineage
    evaluation: dict[str, Any]
    """What the job that made this release has measured. Empty if a person published the release
    from a folder."""

    @property
    def held_out_share(self) -> frozenset[str]:
        """As in `TrainingData`."""
        return frozenset(self.evaluation.get("held_out_share", ()))


def damaged_releases(pipeline_dir: Path) -> dict[str, tuple[str, ...]]:
    """The damaged releases that a job must pass over, in order, until it finds one that is not
    damaged. Maps each to what is wrong with it. A release that the server has passed over is
    included too, unless somebody asks for it again (it is pending)."""
    damaged = {}
    refused = stood_in_for(pipeline_dir)
    if refused is not None and refused != pending_release(pipeline_dir):
        reasons = verify_release(pipeline_dir / refused)
        damaged[refused] = reasons or ("the server did not take it",)
    for release_id in _candidates(pipeline_dir):
        reasons = verify_release(pipeline_dir / release_id)
        if not reasons:
            break
        damaged[release_id] = reasons
    return damaged


def find_parent(pipeline_dir: Path, passed_over: Collection[str] = ()) -> Parent | None:
    """The release from which a job continues, or None. Raises ReleaseError if it cannot be read.

    It is the first of these that is not in `passed_over`: the pending release (which waits for a
    server), the served release, and then the older releases that were live, newest first.
    """
    chosen = (each for each in _candidates(pipeline_dir) if each not in passed_over)
    if (found := next(chosen, None)) is None:
        return None
    folder = pipeline_dir / found
    release = load_release(folder)
    return Parent(
        id=found, folder=folder, lineage=release.lineage, evaluation=release.evaluation or {}
    )


def _candidates(pipeline_dir: Path) -> list[str]:
    """The releases that may be the parent, in the order in which a server tries them: each one only
    if those before it are damaged."""
    served = served_release(pipeline_dir)
    older = [
        each
        for each in reversed(live_releases(pipeline_dir))
        if served is None or release_number(each) < release_number(served.name)
    ]
    chosen = (pending_release(pipeline_dir), served.name if served is not None else None)
    return list(dict.fromkeys(filter(None, (*chosen, *older))))


class DatasetSnapshot(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    dataset: str
    """`owner/name`, or a git URL."""
    ref: str
    revision: Revision
    base: Revision | None = None
    """The revision that the parent release was trained on. None if there is no such revision, if it
    cannot be downloaded, or if it belongs to another dataset."""
    parent: str | None = None
    """The release from which the job continues: the pending release (which waits for a server), or
    else the served one."""
    passed_over: tuple[str, ...] = ()
    """Damaged releases that would otherwise have been the parent. `parent` is the next release that
    is not damaged."""
    no_delta: str | None = None
    """Why the job cannot continue from the parent's weights (a delta). None if it can."""

    @property
    def is_whole(self) -> bool:
        """Whether all downloaded files are still on the disk."""
        return all(
            (revision.folder / file).is_file()
            for revision in filter(None, (self.revision, self.base))
            for file in filter(is_needed, revision.files)
        )


def take_snapshot(
    hub: DatasetHub | GitDataset, ref: str, sha: str | None, parent: Parent | None
) -> DatasetSnapshot:
    """Download the revision to train on, and the revision that the parent release was trained on.

    sha: the commit to train on, or None for the newest commit of `ref`. Raises SnapshotError. If
    the hub does not answer, it is asked again for PATIENCE_SECONDS before this error is raised.
    """
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return _take(hub, ref, sha, parent)
        except HubAway as error:
            if time.monotonic() >= deadline:
                raise
            logger.warning("%s; asking again", error)
            time.sleep(RETRY_SECONDS)


def _take(
    hub: DatasetHub | GitDataset, ref: str, sha: str | None, parent: Parent | None
) -> DatasetSnapshot:
    revision = hub.download(sha or hub.head(ref))
    base, no_delta = _base(hub, revision, parent)
    return DatasetSnapshot(
        dataset=hub.dataset,
        ref=ref,
        revision=revision,
        base=base,
        parent=parent.id if parent is not None else None,
        no_delta=no_delta,
    )


def _base(
    hub: DatasetHub | GitDataset, revision: Revision, parent: Parent | None
) -> tuple[Revision | None, str | None]:
    if parent is None:
        return None, "there is no release to go on from"
    seen = parent.lineage.dataset_revision
    not_trained = f"release {parent.id} was not trained on {hub.dataset}"
    if seen is None:
        return None, not_trained
    if seen == revision.sha:
        return revision, None
    base: Revision | None = None
    try:
        base = hub.download(seen)
    except SnapshotError as error:
        # After a temporary failure, another attempt may reach this revision.
        if isinstance(error, HubAway) or is_temporary(error):
            raise
        logger.info("%s", error)
        problem = "cannot be reached"
    else:
        if hub.is_ancestor(seen, revision.sha):
            return base, None
        problem = "was removed (by a force-push)"
    # A dataset that was renamed has a new name, but the same commits. So compare the commits first.
    if parent.lineage.dataset != hub.dataset:
        return None, not_trained
    return base, f"revision {seen}, which release {parent.id} has seen, {problem}"
