"""The releases of one pipeline on disk: list, load, what is served, what is pending, prune.

A pipeline's folder is `<home>/releases/<pipeline>`, called `pipeline_dir` here:

    r000042-1f3ac9d2/   a release, immutable
    current             a link to the served release; only the server writes it, after the probe
    previous            a link to what was served before it, whatever server it was
    pending             the id of a release that the next server to start swaps in
    pinned              ids that are never pruned, one per line
    counter             the last number given to a release, never given again
"""

import logging
import os
import re
import shutil
import time
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout
from pydantic import ValidationError

from serving.errors import ReleaseError
from serving.weights.release import RELEASE_FILE, Release

logger = logging.getLogger(__name__)

CURRENT = "current"
PREVIOUS = "previous"
PENDING = "pending"
PINNED = "pinned"
COUNTER = "counter"
UNFINISHED = ".unfinished-"
"""Prefix of folders that are being written or removed; without the lock held they are leftovers."""
REPLACING = ".replacing-"
"""Prefix of what becomes `current`, `previous` or `pending`. These are written without the lock,
which a publisher holds for long; so one is a leftover only once it is older than
REPLACING_SECONDS."""
REPLACING_SECONDS = 60.0

_RELEASE_ID = re.compile(r"r(\d{6,})-[0-9a-f]{8}")


def release_number(release_id: str) -> int:
    """The counter in an id: 42 for `r000042-1f3ac9d2`. Raises ReleaseError."""
    match = _RELEASE_ID.fullmatch(release_id)
    if match is None:
        raise ReleaseError(f"{release_id!r} is not a release id, which reads r000042-1f3ac9d2")
    return int(match[1])


def load_release(folder: Path) -> Release:
    """The manifest of a release folder; nothing else of it is looked at. Raises ReleaseError."""
    path = folder / RELEASE_FILE
    try:
        return Release.model_validate_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise ReleaseError(f"{folder} is no release: it has no {RELEASE_FILE}") from None
    except ValidationError as error:
        raise ReleaseError(
            *(
                ": ".join(
                    [str(path), *filter(None, [".".join(map(str, each["loc"]))]), each["msg"]]
                )
                for each in error.errors()
            )
        ) from None


def list_releases(pipeline_dir: Path) -> list[Release]:
    """Every release, oldest first. One whose manifest cannot be read is logged and left out."""
    releases = []
    for release_id in release_ids(pipeline_dir):
        try:
            releases.append(load_release(pipeline_dir / release_id))
        except ReleaseError as error:
            logger.warning("left out of the list: %s", error)
    return releases


def release_ids(pipeline_dir: Path) -> list[str]:
    """The ids of all release folders, oldest first."""
    if not pipeline_dir.is_dir():
        return []
    found = [
        entry.name
        for entry in os.scandir(pipeline_dir)
        if _RELEASE_ID.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
    ]
    return sorted(found, key=release_number)


def served_release(pipeline_dir: Path) -> Path | None:
    """The folder that `current` names, read once: hold on to it, the link may move.

    None before the first release. The folder may be gone; `load_release` says so.
    """
    target = _target(pipeline_dir / CURRENT)
    return None if target is None else pipeline_dir / target


def previous_release(pipeline_dir: Path) -> str | None:
    """The id of what was served before the served one; it may be pruned by now."""
    return _whole_target(pipeline_dir / PREVIOUS)


def set_current(pipeline_dir: Path, release_id: str) -> None:
    """Point `current` at a release, in one step. For the server alone."""
    release_number(release_id)
    before = _whole_target(pipeline_dir / CURRENT)
    # Going back, the way forth is not remembered.
    if before is not None and release_id not in (before, previous_release(pipeline_dir)):
        _link(pipeline_dir, PREVIOUS, before)
    _link(pipeline_dir, CURRENT, release_id)
    fsync_dir(pipeline_dir)


def _target(link: Path) -> str | None:
    try:
        target = os.readlink(link)
    except FileNotFoundError:
        return None
    release_number(target)
    return target


def _whole_target(link: Path) -> str | None:
    """None also for one that names no release."""
    try:
        return _target(link)
    except ReleaseError as error:
        logger.warning("%s: %s", link, error)
        return None


def _link(pipeline_dir: Path, name: str, release_id: str) -> None:
    link = pipeline_dir / f"{REPLACING}{uuid.uuid4().hex[:8]}"
    os.symlink(release_id, link)
    os.replace(link, pipeline_dir / name)


def pending_release(pipeline_dir: Path) -> str | None:
    """The id that the next server to start must swap in."""
    try:
        text = (pipeline_dir / PENDING).read_text().strip()
    except FileNotFoundError:
        return None
    release_number(text)
    return text


def set_pending(pipeline_dir: Path, release_id: str) -> None:
    """Leave a release for the next server to start. Written before a server is looked for, so
    that one which starts in between finds it."""
    release_number(release_id)
    write_durably(pipeline_dir / PENDING, release_id + "\n", prefix=REPLACING)


def clear_pending(pipeline_dir: Path, release_id: str) -> None:
    """Remove the marker when it names `release_id`; another release, newer or older, still waits
    for its own answer."""
    try:
        pending = pending_release(pipeline_dir)
    except ReleaseError:
        pending = release_id  # unreadable: it would be tried again at every start
    if pending == release_id:
        (pipeline_dir / PENDING).unlink(missing_ok=True)
        fsync_dir(pipeline_dir)


def pinned_releases(pipeline_dir: Path) -> list[str]:
    """The ids that are never pruned, oldest first."""
    try:
        return sorted((pipeline_dir / PINNED).read_text().split(), key=release_number)
    except FileNotFoundError:
        return []


def pin(pipeline_dir: Path, release_id: str) -> None:
    """Keep a release until it is unpinned. Raises ReleaseError where there is none of that id."""
    with release_lock(pipeline_dir):
        if release_id not in release_ids(pipeline_dir):
            raise ReleaseError(f"{release_id!r} is no release in {pipeline_dir}")
        _write_pinned(pipeline_dir, {*pinned_releases(pipeline_dir), release_id})


def unpin(pipeline_dir: Path, release_id: str) -> None:
    """Let a release be pruned again. Raises ReleaseError where it was not pinned."""
    with release_lock(pipeline_dir):
        pinned = pinned_releases(pipeline_dir)
        if release_id not in pinned:
            raise ReleaseError(
                f"{release_id!r} is not pinned; pinned are: {', '.join(pinned) or 'none'}"
            )
        _write_pinned(pipeline_dir, {*pinned} - {release_id})


def _write_pinned(pipeline_dir: Path, ids: Collection[str]) -> None:
    text = "".join(f"{release_id}\n" for release_id in sorted(ids, key=release_number))
    write_durably(pipeline_dir / PINNED, text)


def prune(pipeline_dir: Path, keep: int) -> list[str]:
    """Remove all but the newest `keep` releases, and what one that was killed left of it; returns
    the ids that went, oldest first.

    The served, the pending and the pinned ones stay in any case.
    """
    if keep < 0:
        raise ReleaseError(f"keep must be at least 0, not {keep}")
    if not pipeline_dir.is_dir():
        return []
    with release_lock(pipeline_dir):
        sweep_locked(pipeline_dir)
        ids = release_ids(pipeline_dir)
        served = served_release(pipeline_dir)
        stays = {
            *ids[max(0, len(ids) - keep) :],
            *pinned_releases(pipeline_dir),
            pending_release(pipeline_dir),
        }
        if served is not None:
            stays.add(served.name)
        removed = [release_id for release_id in ids if release_id not in stays]
        for release_id in removed:
            # Renamed first: a reader never meets half a release.
            doomed = pipeline_dir / f"{UNFINISHED}{release_id}"
            os.rename(pipeline_dir / release_id, doomed)
            shutil.rmtree(doomed)
    return removed


def sweep(pipeline_dir: Path) -> list[str]:
    """Remove what a killed publisher or prune left behind; nothing while one is at work."""
    if not pipeline_dir.is_dir():
        return []
    try:
        with release_lock(pipeline_dir, timeout_seconds=0):
            return sweep_locked(pipeline_dir)
    except Timeout:
        return []


def sweep_locked(pipeline_dir: Path) -> list[str]:
    """The same for one who holds the lock."""
    leftovers = [entry for entry in pipeline_dir.iterdir() if _is_leftover(entry)]
    for entry in leftovers:
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink(missing_ok=True)
    return sorted(entry.name for entry in leftovers)


def _is_leftover(entry: Path) -> bool:
    if not entry.name.startswith(REPLACING):
        return entry.name.startswith(UNFINISHED)
    try:
        return time.time() - entry.lstat().st_mtime > REPLACING_SECONDS
    except FileNotFoundError:
        return False


def next_number(pipeline_dir: Path) -> int:
    """Count one further, durably, before the number is used. For one who holds the lock."""
    counter = pipeline_dir / COUNTER
    last = int(counter.read_text()) if counter.exists() else 0
    present = [release_number(release_id) for release_id in release_ids(pipeline_dir)]
    number = max([last, *present]) + 1
    write_durably(counter, f"{number}\n")
    return number


@contextmanager
def release_lock(pipeline_dir: Path, timeout_seconds: float = -1) -> Iterator[None]:
    """One publisher or prune at a time, across processes; the kernel frees it on a kill."""
    with FileLock(pipeline_dir / ".lock", timeout=timeout_seconds):
        yield


def write_durably(path: Path, text: str, *, prefix: str = UNFINISHED) -> None:
    """Replace a small file in one step that survives a power cut."""
    temp = path.with_name(f"{prefix}{uuid.uuid4().hex[:8]}")
    with temp.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temp, path)
    fsync_dir(path.parent)


def fsync_dir(folder: Path) -> None:
    """Make the renames in `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
