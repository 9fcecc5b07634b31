"""Reads and changes a pipeline's folder, which holds the pipeline's releases and records which
release is served.

A pipeline's folder is `<home>/releases/<pipeline>`. This module calls it `pipeline_dir`. It holds:

    r000042-1f3ac9d2/   a release, immutable
    current             a link to the served release: the release that answers new requests
    previous            a link to a release that was served earlier; `set_current` says which one
    live                the ids of the releases that were served, one per line, oldest first,
                        without the releases from which somebody has rolled back. The last id is the
                        release that should be served
    pending             the id of a release; the next server that starts swaps this release in
    pinned              the ids of the releases that must not be removed, one per line, see
                        `serving/weights/release_removal.py`
    counter             the last number that was taken for a release; no number is used twice
    .unfinished-…       a release that is being written or removed, see `UNFINISHED`
    .lock               the lock of the folder, see `release_lock`
    .pending.lock       the lock of the file `pending`

To swap a release in means to make it the served release. Only the server writes `current`,
`previous` and `live`, after a release has passed all checks. `current` normally points at the last
release in `live`. If this release is damaged, the server serves an older release of `live` as a
substitute. Then `current` points at the substitute, and the substitute "stands in for" the last
release in `live`.
"""

import errno
import logging
import os
import re
from collections.abc import Collection
from pathlib import Path

from filelock import BaseFileLock, FileLock
from pydantic import ValidationError

from serving.errors import ReleaseError, Superseded, is_temporary
from serving.weights.atomic_file import fsync_dir, link_atomically, write_atomically
from serving.weights.release import RELEASE_FILE, Release, faults_in

logger = logging.getLogger(__name__)

CURRENT = "current"
PREVIOUS = "previous"
LIVE = "live"
PENDING = "pending"
COUNTER = "counter"
UNFINISHED = ".unfinished-"
"""Prefix of the names of release folders that are being written or removed.

A process holds the lock of the pipeline's folder while it writes or removes a release. So if a
folder with this prefix exists while the lock is free, the process that made this folder was killed
or could not finish.
"""

_RELEASE_ID = re.compile(r"r(\d{6,})-[0-9a-f]{8}")


def release_number(release_id: str) -> int:
    """The number in a release id: 42 for `r000042-1f3ac9d2`. Raises ReleaseError if the text is not
    a release id."""
    match = _RELEASE_ID.fullmatch(release_id)
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
        return Release.model_validate_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise ReleaseError(f"{folder} is not a release: it has no {RELEASE_FILE}") from None
    except OSError as error:
        if is_temporary(error):
            raise
        # For example, a part of the disk is damaged.
        raise ReleaseError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValidationError as error:
        raise ReleaseError(*faults_in(path, error)) from None


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
        if _RELEASE_ID.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
    ]
    return sorted(found, key=release_number)


def served_release(pipeline_dir: Path) -> Path | None:
    """The folder of the release that `current` points at. None if no release was served yet. If
    `current` is a file or a folder, not a link, this is the folder of the last release in `live`;
    None if there is no `live`.

    Call this once and keep the result, because the server may move the link between two calls. The
    folder may no longer exist. Raises ReleaseError if the target of the link is not a release id.
    """
    target = _target(pipeline_dir / CURRENT)
    return None if target is None else pipeline_dir / target


def served_release_id(pipeline_dir: Path) -> str | None:
    """The id of the release that `current` points at. None if `current` does not exist, or if its
    target is not a release id. If `current` is a file or a folder, not a link, this is the last id
    in `live`; None if there is no `live`. The folder of the release may no longer exist."""
    return _readable_target(pipeline_dir / CURRENT)


def previous_release_id(pipeline_dir: Path) -> str | None:
    """The id of the release that `previous` points at; None if there is no such link. The folder of
    this release may no longer exist."""
    return _readable_target(pipeline_dir / PREVIOUS)


def set_current(pipeline_dir: Path, release_id: str, stands_in_for: str | None = None) -> None:
    """Record that the server now serves `release_id`. Only the server may call this. `current`
    changes atomically. There are two cases:

    - `stands_in_for` is None. `release_id` becomes the last id in `live`, and `previous` changes to
      the release that was served until now. But `previous` stays unchanged in two cases: the
      server already served `release_id`, or `previous` already names `release_id`.
    - `release_id` is only a substitute, and `stands_in_for` is the id of the release that the
      server could not serve. Nobody asked for a rollback. So `stands_in_for` stays the last id in
      `live`, and `previous` does not change.
    """
    should_be_served = stands_in_for or release_id
    number = release_number(should_be_served)
    before = served_release_id(pipeline_dir)
    # Leave newer releases out of `live`, because a swap to an older release is a rollback from the
    # newer ones. Also leave out releases whose folder is gone, because they cannot be served again.
    older = (
        each
        for each in live_releases(pipeline_dir)
        if release_number(each) < number and (pipeline_dir / each).is_dir()
    )
    live = "".join(f"{each}\n" for each in (*older, should_be_served))
    # A rollback to the release that `previous` names does not change `previous`. Otherwise
    # `previous` would name the release that somebody has just rolled back from.
    is_known = release_id in (before, previous_release_id(pipeline_dir))
    if before is not None and stands_in_for is None and not is_known:
        link_atomically(pipeline_dir / PREVIOUS, before)
    link_atomically(pipeline_dir / CURRENT, release_id)
    fsync_dir(pipeline_dir)
    # Write `live` after `current`. If the server is killed between the two writes, nobody has been
    # told the result of the swap yet. So it does no harm that the next server may serve either
    # `release_id` or the release that was served before the swap.
    path = pipeline_dir / LIVE
    if not path.exists() or path.read_text(errors="replace") != live:
        write_atomically(path, live)


def live_releases(pipeline_dir: Path) -> list[str]:
    """The ids of the releases that were served, oldest first, without the releases from which
    somebody has rolled back.

    The last id is the release that should be served. Each of these releases may be damaged by now,
    or its folder may be gone. Empty if no release was served yet.
    """
    current = served_release_id(pipeline_dir)
    number = release_number(current) if current is not None else 0
    found = _listed_live(pipeline_dir)
    # `current` may be newer than all releases in `live`, if a server was killed between the two
    # writes of `set_current`.
    if current is not None and all(release_number(each) < number for each in found):
        found.append(current)
    return found


def _listed_live(pipeline_dir: Path) -> list[str]:
    """The valid ids in the file `live`; empty if there is no such file."""
    try:
        listed = (pipeline_dir / LIVE).read_text(errors="replace").split()
    except FileNotFoundError:
        return []
    return [each for each in listed if _RELEASE_ID.fullmatch(each)]


def stood_in_for(pipeline_dir: Path) -> str | None:
    """If `current` points at a substitute, the id of the release that the substitute stands in for.

    None if `current` points at the release that should be served. Also None if there is no
    `current`, or if its target is not a release id.
    """
    current, listed = served_release_id(pipeline_dir), live_releases(pipeline_dir)
    return listed[-1] if current is not None and listed[-1] != current else None


def _target(link: Path) -> str | None:
    """The target of `link`; None if `link` does not exist. If a file or a folder has replaced the
    link, this is the last id in `live` for `current`, and None for `previous`. Raises ReleaseError
    if the target is not a release id."""
    try:
        target = os.readlink(link)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # A tool that follows links has put a file or a folder here. In place of `current`, use the
        # last id in `live`: the release that should be served. The next `set_current` makes the
        # link again.
        logger.warning("%s is not a link, so it is ignored", link)
        listed = _listed_live(link.parent) if link.name == CURRENT else []
        return listed[-1] if listed else None
    release_number(target)
    return target


def _readable_target(link: Path) -> str | None:
    """Like `_target`. But if the target is not a release id, logs a warning and returns None."""
    try:
        return _target(link)
    except ReleaseError as error:
        logger.warning("%s: %s", link, error)
        return None


def pending_release(pipeline_dir: Path) -> str | None:
    """The id of the pending release: the next server that starts swaps this release in. None if no
    release is pending.

    Raises ReleaseError if the content of the file is not a release id.
    """
    try:
        text = (pipeline_dir / PENDING).read_text(errors="replace").strip()
    except FileNotFoundError:
        return None
    release_number(text)
    return text


def chosen_release_id(pipeline_dir: Path) -> str | None:
    """The id of the release that was chosen last: the pending one, or else the one that should be
    served. (If it is damaged, a substitute is served, but nobody has chosen the substitute.)"""
    return _readable_pending(pipeline_dir) or next(reversed(live_releases(pipeline_dir)), None)


def set_pending(
    pipeline_dir: Path, release_id: str, *, instead_of: Collection[str | None] | None = None
) -> str | None:
    """Choose a release: mark it as pending, so that the next server that starts swaps it in.
    Returns the id of the release that was pending before. None if there was no such release, or if
    the file `pending` did not contain a release id.

    instead_of: the releases of which one must be the chosen release until now; None among them
    means that no release is chosen. Raises Superseded if the chosen release is another one. None
    chooses the release in any case.

    Call this before you ask the server to swap the release in. If no server runs at that time, the
    mark stays until a server starts.
    """
    release_number(release_id)
    with _pending_lock(pipeline_dir):
        earlier = _readable_pending(pipeline_dir)
        if instead_of is not None:
            chosen = chosen_release_id(pipeline_dir)
            if chosen not in instead_of:
                raise Superseded(release_id, chosen)
        write_atomically(pipeline_dir / PENDING, release_id + "\n")
    return earlier


def clear_pending(pipeline_dir: Path, release_id: str, *, earlier: str | None = None) -> None:
    """Remove the file `pending` if it names `release_id`. If it names another release, that one
    still waits for its swap. earlier: what `set_pending` returned, to make it pending again."""
    with _pending_lock(pipeline_dir):
        # Also remove a file without a release id, because `prune` and `remove` fail while such a
        # file exists.
        if _readable_pending(pipeline_dir) not in (release_id, None):
            return
        if earlier is not None and earlier != release_id:
            write_atomically(pipeline_dir / PENDING, earlier + "\n")
        else:
            (pipeline_dir / PENDING).unlink(missing_ok=True)
            fsync_dir(pipeline_dir)


def _readable_pending(pipeline_dir: Path) -> str | None:
    """Like `pending_release`, but None if the file holds no release id."""
    try:
        return pending_release(pipeline_dir)
    except ReleaseError:
        return None


def _pending_lock(pipeline_dir: Path) -> BaseFileLock:
    """Held while the file `pending` is read and changed, so that no mark gets lost."""
    return FileLock(pipeline_dir / ".pending.lock")


def next_number(pipeline_dir: Path) -> int:
    """The number for the next release. The caller must hold the lock. The new counter is on disk
    before this returns, so that no number is ever used twice. If the counter is lost or damaged,
    the numbers continue from the highest release that is present."""
    counter = pipeline_dir / COUNTER
    try:
        last = int(counter.read_bytes())
    except FileNotFoundError:
        last = 0
    except ValueError:
        logger.warning("%s holds no number; counting from the highest release present", counter)
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
