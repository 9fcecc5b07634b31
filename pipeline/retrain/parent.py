"""`Parent`: the release from which a job continues, and with which its new weights are compared."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
