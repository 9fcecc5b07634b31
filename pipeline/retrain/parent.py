"""`Parent`: the release that a job goes on from, and is measured against."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving.weights.release import Lineage, Release
from serving.weights.releases import load_release, pending_release, served_release


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


def chosen_release(pipeline_dir: Path) -> Path | None:
    """The folder of the release that waits for a server, else of the served one, else None."""
    pending = pending_release(pipeline_dir)
    return pipeline_dir / pending if pending is not None else served_release(pipeline_dir)


def find_parent(pipeline_dir: Path) -> Parent | None:
    """The chosen release. Raises ReleaseError where there is one that cannot be read."""
    folder = chosen_release(pipeline_dir)
    return None if folder is None else Parent.of(load_release(folder), folder)


def load_parent(pipeline_dir: Path, release_id: str) -> Parent:
    """A release by id. Raises ReleaseError."""
    folder = pipeline_dir / release_id
    return Parent.of(load_release(folder), folder)
