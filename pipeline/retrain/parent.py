"""`Parent`: the release that a job goes on from, and is measured against."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving.weights.release import Lineage, Release
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
    """What its own job measured; empty for a folder published by hand."""

    @classmethod
    def of(cls, release: Release, folder: Path) -> "Parent":
        return cls(
            id=release.id,
            folder=folder,
            lineage=release.lineage,
            evaluation=release.evaluation or {},
        )


def chosen_release(pipeline_dir: Path, passed_over: Collection[str] = ()) -> Path | None:
    """The folder of the release that waits for a server, else of the served one, else of the
    newest one before it that was live; but none that is `passed_over`. None if there is no other.
    """
    chosen = (each for each in _candidates(pipeline_dir) if each not in passed_over)
    first = next(chosen, None)
    return None if first is None else pipeline_dir / first


def damaged_releases(pipeline_dir: Path) -> dict[str, tuple[str, ...]]:
    """The releases that a job has to pass over to find a whole one to go on from, and what is
    wrong with each. So also the one that a server has passed over, unless somebody asks for it."""
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
    """The chosen release. Raises ReleaseError where there is one that cannot be read."""
    folder = chosen_release(pipeline_dir, passed_over)
    return None if folder is None else Parent.of(load_release(folder), folder)


def load_parent(pipeline_dir: Path, release_id: str) -> Parent:
    """A release by id. Raises ReleaseError."""
    folder = pipeline_dir / release_id
    return Parent.of(load_release(folder), folder)


def _candidates(pipeline_dir: Path) -> Iterator[str]:
    """In the order in which a server serves them, if those before are damaged."""
    pending = pending_release(pipeline_dir)
    if pending is not None:
        yield pending
    served = served_release(pipeline_dir)
    if served is not None and served.name != pending:
        yield served.name
    for release_id in reversed(live_releases(pipeline_dir)):
        is_older = served is None or release_number(release_id) < release_number(served.name)
        if is_older and release_id != pending:
            yield release_id
