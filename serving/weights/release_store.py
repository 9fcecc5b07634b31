"""Reads and changes a pipeline's folder, which holds the pipeline's releases and records which
release is served.

A pipeline's folder is `<home>/releases/<pipeline>`. This module calls it `pipeline_dir`. It holds:

    r000042-1f3ac9d2/   a release, immutable
    served.json         the record `Served`: what was live, what is served, and what is pending
    current             a link to the served release, for people and other programs; hotpush itself
                        reads only `served.json`
    pinned              the ids of the releases that must not be removed, one per line
    counter             the last number that was taken for a release; no number is used twice
    .unfinished-…       a release that is being written or removed, see `UNFINISHED`
    .lock               the lock of the folder, see `release_lock`
    .served.lock        the lock of `served.json`

To swap a release in means to make it the served release. Only the server does this, after the
release has passed all checks.
"""

import logging
import os
import shutil
import uuid
from collections import defaultdict
from collections.abc import Collection, Iterable
from contextlib import nullcontext, suppress
from pathlib import Path

from filelock import BaseFileLock, FileLock, Timeout
from pydantic import BaseModel, ConfigDict, Field

from serving.errors import ReleaseError, Superseded, is_temporary
from serving.weights.atomic_file import fsync, is_abandoned, link_atomically, write_atomically
from serving.weights.release import RELEASE_FILE, RELEASE_ID, Release, ReleaseId, parse

logger = logging.getLogger(__name__)

CURRENT = "current"
SERVED = "served.json"
COUNTER = "counter"
PINNED = "pinned"
UNFINISHED = ".unfinished-"
"""Prefix of the names of release folders that are being written or removed, and of a folder that
stood in the place of the link.

A process holds the lock of the pipeline's folder while it writes or removes a release. So if a
folder with this prefix exists while the lock is free, the process that made this folder was killed
or could not finish.
"""


class Served(BaseModel):
    """What was served, is served and should be served."""

    model_config = ConfigDict(frozen=True, extra="forbid", serialize_by_alias=True)

    history: tuple[ReleaseId, ...] = Field(default=(), alias="live")
    """The releases that were served, oldest first, without those from which somebody has rolled
    back. The last one should be served. Each of them may be damaged by now, or its folder may be
    gone."""
    substitute: ReleaseId | None = None
    """The older release that is served because the last one of `history` is damaged."""
    pending: ReleaseId | None = None
    """The release that the next server that starts swaps in."""

    @property
    def release(self) -> str | None:
        """The served release; None if no release was served yet."""
        return self.substitute or next(reversed(self.history), None)

    @property
    def chosen(self) -> str | None:
        """The release that was chosen last: the pending one, or else the one that should be served.
        (A substitute was chosen by nobody.)"""
        return self.pending or next(reversed(self.history), None)


def release_number(release_id: str) -> int:
    """The number in a release id: 42 for `r000042-1f3ac9d2`. Raises ReleaseError if the text is not
    a release id."""
    match = RELEASE_ID.fullmatch(release_id)
    if match is None:
        raise ReleaseError(
            f"{release_id!r} is not a release id; a release id looks like r000042-1f3ac9d2"
        )
    return int(match[1])


def load_release(folder: Path) -> Release:
    """The manifest of a release folder. Opens no other file. Raises ReleaseError. But a temporary
    error, such as too many open files, is an OSError, because it says nothing about the release.
    """
    path = folder / RELEASE_FILE
    try:
        return parse(Release, path.read_bytes(), path)
    except (FileNotFoundError, NotADirectoryError):
        raise ReleaseError(f"{folder} is not a release: it has no {RELEASE_FILE}") from None
    except OSError as error:
        if is_temporary(error):
            raise
        # For example, a part of the disk is damaged.
        raise ReleaseError(f"{path}: cannot be read: {error.strerror or error}") from error


def is_checkpoint(folder: Path, pipeline_dir: Path) -> bool:
    """Whether `folder` is a checkpoint elsewhere, and no release."""
    is_inside = folder.resolve().is_relative_to(pipeline_dir.resolve())
    return not is_inside and not (folder / RELEASE_FILE).exists()


def list_releases(pipeline_dir: Path) -> list[Release]:
    """The manifests of all releases, oldest first. If a manifest is damaged, this function logs a
    warning and leaves the release out. Raises OSError as `load_release`."""
    releases = []
    for release_id in release_ids(pipeline_dir):
        try:
            releases.append(load_release(pipeline_dir / release_id))
        except ReleaseError as error:
            logger.warning("release left out of the list: %s", error)
    return releases


def release_ids(pipeline_dir: Path) -> list[str]:
    """The ids of all release folders, oldest first."""
    if not pipeline_dir.is_dir():
        return []
    found = [
        entry.name
        for entry in os.scandir(pipeline_dir)
        if RELEASE_ID.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
    ]
    return sorted(found, key=release_number)


def read_served(pipeline_dir: Path) -> Served:
    """Raises ReleaseError if the record is damaged."""
    path = pipeline_dir / SERVED
    try:
        return parse(Served, path.read_bytes(), path)
    except FileNotFoundError:
        return Served()


def served_or_empty(pipeline_dir: Path) -> Served:
    """Like `read_served`. But a damaged record counts as empty, so that the next write mends it."""
    try:
        return read_served(pipeline_dir)
    except ReleaseError as error:
        logger.warning("%s", error)
        return Served()


def served_release(pipeline_dir: Path) -> Path | None:
    """The folder of the served release. None if no release was served yet. The folder may no longer
    exist. Raises ReleaseError if the record is damaged."""
    served = read_served(pipeline_dir).release
    return None if served is None else pipeline_dir / served


def stood_in_for(pipeline_dir: Path) -> str | None:
    """The damaged release for which a substitute is served. None if the release is served that
    should be served."""
    served = served_or_empty(pipeline_dir)
    return None if served.substitute is None else served.history[-1]


def pending_release(pipeline_dir: Path) -> str | None:
    """The id of the pending release: the next server that starts swaps this release in. None if no
    release is pending. Raises ReleaseError if the record is damaged."""
    return read_served(pipeline_dir).pending


def set_current(pipeline_dir: Path, release_id: str, stands_in_for: str | None = None) -> None:
    """Record that the server now serves `release_id`. Only the server may call this, and a job
    elsewhere, in a folder of its own.

    stands_in_for: the release that the server could not serve, if `release_id` is only its
    substitute. Nobody asked for a rollback, so `stands_in_for` stays the last one of `history`.
    """
    should_be_served = stands_in_for or release_id
    number = release_number(should_be_served)
    with _served_lock(pipeline_dir):
        served = served_or_empty(pipeline_dir)
        # Leave newer releases out, because a swap to an older release is a rollback from the newer
        # ones. Also leave out releases whose folder is gone: they cannot be served again.
        older = [
            each
            for each in served.history
            if release_number(each) < number and (pipeline_dir / each).is_dir()
        ]
        substitute = None if stands_in_for is None else release_id
        _set_served(pipeline_dir, served, history=(*older, should_be_served), substitute=substitute)


def set_back(pipeline_dir: Path, earlier: Served) -> None:
    """Record again what was live and served, after a swap that failed. What is pending stays. Only
    the server may call this."""
    with _served_lock(pipeline_dir):
        served = served_or_empty(pipeline_dir)
        _set_served(pipeline_dir, served, history=earlier.history, substitute=earlier.substitute)


def _set_served(pipeline_dir: Path, served: Served, **changes: object) -> None:
    changed = _write_served(pipeline_dir, served, **changes)
    # A server that is killed before this makes the link when it starts again.
    link = pipeline_dir / CURRENT
    if link.is_dir() and not link.is_symlink():
        # A tool that copied the releases has put a copy of one in the place of the link.
        link.rename(pipeline_dir / f"{UNFINISHED}{CURRENT}-{uuid.uuid4().hex[:8]}")
    if changed.release is None:
        link.unlink(missing_ok=True)
    else:
        link_atomically(link, changed.release)
    fsync(pipeline_dir)


def set_pending(
    pipeline_dir: Path, release_id: str, *, instead_of: Collection[str | None] | None = None
) -> str | None:
    """Choose a release: mark it as pending, so that the next server that starts swaps it in.
    Returns the id of the release that was pending before; None if there was none.

    instead_of: the releases of which one must be the chosen release until now; None among them
    means that no release is chosen. Raises Superseded if the chosen release is another one. None
    chooses the release in any case.

    Call this before you ask the server to swap the release in. If no server runs at that time, the
    mark stays until a server starts.
    """
    release_number(release_id)
    with _served_lock(pipeline_dir):
        served = served_or_empty(pipeline_dir)
        if instead_of is not None and served.chosen not in instead_of:
            raise Superseded(release_id, served.chosen)
        _write_served(pipeline_dir, served, pending=release_id)
    return served.pending


def clear_pending(pipeline_dir: Path, release_id: str, *, earlier: str | None = None) -> None:
    """Remove the mark of `release_id`. If another release is pending, that one still waits for its
    swap. earlier: what `set_pending` returned, to make it pending again.

    The server calls this at the end of a swap that it has begun. Whoever asked for a swap calls it
    if the server has begun none."""
    with _served_lock(pipeline_dir):
        served = served_or_empty(pipeline_dir)
        if served.pending == release_id:
            again = None if earlier == release_id else earlier
            _write_served(pipeline_dir, served, pending=again)


def _write_served(pipeline_dir: Path, served: Served, **changes: object) -> Served:
    changed = served.model_copy(update=changes)
    if changed != served:  # so a server also starts on a full disk
        write_atomically(pipeline_dir / SERVED, changed.model_dump_json(indent=1) + "\n")
    return changed


def _served_lock(pipeline_dir: Path) -> BaseFileLock:
    """Held while the record is read and changed, so that no change gets lost."""
    return FileLock(pipeline_dir / ".served.lock")


def next_number(pipeline_dir: Path) -> int:
    """The number for the next release. The caller must hold the lock. The new counter is on disk
    before this returns, so that no number is ever used twice. If the counter is lost or damaged,
    the numbers continue from the highest release that is present."""
    counter = pipeline_dir / COUNTER
    try:
        last = int(counter.read_bytes())
    except (FileNotFoundError, ValueError):
        last = 0
    present = [release_number(release_id) for release_id in release_ids(pipeline_dir)]
    number = max([last, *present]) + 1
    write_atomically(counter, f"{number}\n")
    return number


def release_lock(pipeline_dir: Path, timeout_seconds: float = -1) -> BaseFileLock:
    """The lock of the pipeline's folder. A `with` block waits for the lock, and holds it. Hold this
    lock to publish, remove, pin or unpin releases. If a process is killed, the kernel frees its
    lock.

    The `with` statement raises filelock.Timeout if the wait takes longer than `timeout_seconds`. If
    `timeout_seconds` is negative, the wait has no limit.
    """
    return FileLock(pipeline_dir / ".lock", timeout=timeout_seconds)


def prune(pipeline_dir: Path, keep: int) -> list[str]:
    """Remove all but the newest `keep` releases; returns the removed ids, oldest first.

    The served, the pending and the pinned releases always stay. Like `sweep`, this function also
    removes what killed processes have left. Raises ReleaseError if `served.json` or `pinned` is
    damaged.
    """
    if not pipeline_dir.is_dir():
        return []
    with release_lock(pipeline_dir):
        sweep_locked(pipeline_dir)
        ids = release_ids(pipeline_dir)
        kept = {*ids[max(0, len(ids) - keep) :], *marks(pipeline_dir)}
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
    reasons = {
        "served": "served; serve another release first: pipeline releases rollback",
        "pending": "pending: the next server that starts will serve it",
        "pinned": f"pinned; unpin it first: pipeline releases unpin {release_id}",
    }
    if found := marks(pipeline_dir)[release_id]:
        because = f"{release_id} is not removed, because it is"
        raise ReleaseError(*(f"{because} {reasons[mark]}" for mark in found))


def pinned_releases(pipeline_dir: Path) -> list[str]:
    """The ids of the releases that must not be removed, oldest first. Raises ReleaseError if the
    file `pinned` contains anything other than release ids."""
    try:
        pinned = (pipeline_dir / PINNED).read_text(errors="replace").split()
    except FileNotFoundError:
        return []
    return sorted(pinned, key=release_number)


def marks(pipeline_dir: Path) -> defaultdict[str, list[str]]:
    """Release → which of `served`, `pending` and `pinned` it is. Raises ReleaseError as
    `read_served` and `pinned_releases`."""
    served, found = read_served(pipeline_dir), defaultdict[str, list[str]](list)
    for mark, ids in (
        ("served", [served.release]),
        ("pending", [served.pending]),
        ("pinned", pinned_releases(pipeline_dir)),
    ):
        for each in filter(None, ids):
            found[each].append(mark)
    return found


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
