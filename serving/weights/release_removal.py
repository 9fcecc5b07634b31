"""Removes releases from a pipeline's folder, and pins those that must stay. Also removes temporary
files and folders that killed processes have left in this folder."""

import os
import shutil
from collections.abc import Iterable
from contextlib import nullcontext, suppress
from pathlib import Path

from filelock import Timeout

from serving.errors import ReleaseError
from serving.weights.atomic_file import is_abandoned, write_atomically
from serving.weights.release_store import (
    UNFINISHED,
    read_served,
    release_ids,
    release_lock,
    release_number,
)

PINNED = "pinned"


def prune(pipeline_dir: Path, keep: int) -> list[str]:
    """Remove all but the newest `keep` releases; returns the removed ids, oldest first.

    The served, the pending and the pinned releases always stay. Like `sweep`, this function also
    removes what killed processes have left. Raises ReleaseError if `keep` is negative, or if
    `served.json` or `pinned` is damaged.
    """
    if keep < 0:
        raise ReleaseError(f"keep must be at least 0, not {keep}")
    if not pipeline_dir.is_dir():
        return []
    with release_lock(pipeline_dir):
        sweep_locked(pipeline_dir)
        ids = release_ids(pipeline_dir)
        served = read_served(pipeline_dir)
        kept = {
            *ids[max(0, len(ids) - keep) :],
            *pinned_releases(pipeline_dir),
            served.release,
            served.pending,
        }
        removed = [release_id for release_id in ids if release_id not in kept]
        for release_id in removed:
            _remove_locked(pipeline_dir, release_id)
    return removed


def remove(pipeline_dir: Path, release_id: str) -> None:
    """Remove one release, which may be damaged. Raises ReleaseError for the same reasons as
    `check_removable`."""
    with release_lock(pipeline_dir):
        check_removable(pipeline_dir, release_id)
        _remove_locked(pipeline_dir, release_id)


def check_removable(pipeline_dir: Path, release_id: str) -> None:
    """Raise ReleaseError if there is no such release, or if it is served, pending or pinned. Also
    raise ReleaseError if `served.json` or `pinned` is damaged."""
    if release_id not in release_ids(pipeline_dir):
        raise ReleaseError(f"{release_id!r} is not a release in {pipeline_dir}")
    served = read_served(pipeline_dir)
    reasons = []
    if release_id == served.release:
        reasons.append("served; serve another release first: pipeline releases rollback")
    if release_id == served.pending:
        reasons.append("pending: the next server that starts will serve it")
    if release_id in pinned_releases(pipeline_dir):
        reasons.append(f"pinned; unpin it first: pipeline releases unpin {release_id}")
    if reasons:
        raise ReleaseError(*(f"{release_id} is not removed, because it is {r}" for r in reasons))


def pinned_releases(pipeline_dir: Path) -> list[str]:
    """The ids of the releases that must not be removed, oldest first. Raises ReleaseError if the
    file `pinned` contains anything other than release ids."""
    try:
        pinned = (pipeline_dir / PINNED).read_text(errors="replace").split()
    except FileNotFoundError:
        return []
    return sorted(pinned, key=release_number)


def pin(pipeline_dir: Path, release_id: str) -> None:
    """Pin the release: until it is unpinned, `prune` and `remove` do not remove it. Raises
    ReleaseError if there is no such release."""
    with release_lock(pipeline_dir):
        if release_id not in release_ids(pipeline_dir):
            raise ReleaseError(f"{release_id!r} is not a release in {pipeline_dir}")
        _write_pinned(pipeline_dir, {*pinned_releases(pipeline_dir), release_id})


def unpin(pipeline_dir: Path, release_id: str) -> None:
    """Undo `pin`: after this, `prune` and `remove` may remove the release. Raises ReleaseError if
    the release was not pinned."""
    with release_lock(pipeline_dir):
        pinned = pinned_releases(pipeline_dir)
        if release_id not in pinned:
            raise ReleaseError(
                f"{release_id!r} is not pinned; the pinned releases: {', '.join(pinned) or 'none'}"
            )
        _write_pinned(pipeline_dir, {*pinned} - {release_id})


def _write_pinned(pipeline_dir: Path, ids: Iterable[str]) -> None:
    text = "".join(f"{release_id}\n" for release_id in sorted(ids, key=release_number))
    write_atomically(pipeline_dir / PINNED, text)


def _remove_locked(pipeline_dir: Path, release_id: str) -> None:
    # Rename the folder first, so that no reader ever sees a release with some files missing.
    renamed = pipeline_dir / f"{UNFINISHED}{release_id}"
    os.rename(pipeline_dir / release_id, renamed)
    shutil.rmtree(renamed)


def sweep(pipeline_dir: Path) -> None:
    """Remove the temporary files and folders that killed processes have left. Does nothing while
    another process holds the lock of the pipeline's folder."""
    if pipeline_dir.is_dir():
        with suppress(Timeout), release_lock(pipeline_dir, timeout_seconds=0):
            sweep_locked(pipeline_dir)


def sweep_locked(pipeline_dir: Path, *, is_purge: bool = False) -> None:
    """Do what `sweep` does. The caller must hold the lock.

    What cannot be removed stays, because no job should fail if another user owns a folder that
    stood in the place of the link `current`. But with `is_purge`, the OSError is raised, because a
    purge must not report that everything is gone.
    """
    for entry in list(pipeline_dir.iterdir()):
        if not (entry.name.startswith(UNFINISHED) or is_abandoned(entry)):
            continue
        with nullcontext() if is_purge else suppress(OSError):
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink(missing_ok=True)
