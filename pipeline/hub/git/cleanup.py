"""Removes what killed git processes left in a repository: locks, half-written objects, and refs of
commits that were never finished. Also ends git processes that still run after their hub was killed.

It never removes a complete object, or a ref to a commit that the hub has confirmed to a client.
"""

import contextlib
import logging
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from pipeline.hub.git.process import INCOMING_PREFIX, PLACE

logger = logging.getLogger(__name__)

GRACE_SECONDS = 5.0
"""The time between SIGTERM and SIGKILL, in which git can remove its locks."""

_LOCKS = ("*.lock", "refs/**/*.lock", "objects/info/*.lock", "objects/pack/*.lock")
# The first two are folders in which git unpacks a push until it has checked the push. Older
# versions of git use the second name. Then unfinished packs, and marks of a push that was being
# stored: git never removes a pack that has such a mark.
_OBJECTS = (
    *("objects/tmp_objdir-*", "objects/incoming-*", "objects/pack/tmp_*"),
    "objects/pack/*.keep",
)
# What is left of commits over the API: their refs, and the crash reports of `git fast-import`.
_COMMITS = (f"{INCOMING_PREFIX}*", "fast_import_crash_*")


def clear_repository(folder: Path) -> None:
    """Removes all these leftovers from one repository. It is called only while nothing writes to
    the repository: the caller holds the repository's lock, or the hub has not started."""
    for pattern in (*_LOCKS, *_OBJECTS, *_COMMITS):
        for path in folder.glob(pattern):
            logger.warning("removing %s: the git process that made it was killed", path)
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def end_processes(root: Path) -> None:
    """Ends the git processes of an earlier hub in `root`, because they may hold locks and move
    refs.

    Only Linux shows the environment of a process, by which they are found. On other systems they
    run to their end.
    """
    deadline = time.monotonic() + GRACE_SECONDS
    while (pids := list(_processes(root))) and time.monotonic() < deadline:
        for pid in pids:
            logger.warning("ending process %d, a git process of an earlier hub", pid)
            # At once: `clear_repository` removes the locks.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _processes(root: Path) -> Iterator[int]:
    """The ids of git processes that work below `root`. They are found by the variable `PLACE` in
    their environment, which git passes on to the processes that it starts."""
    place = os.fsencode(f"{PLACE}={root}/")
    for environment in Path("/proc").glob("[0-9]*/environ"):
        # The processes of other users cannot be read, and a process may end while it is read.
        with contextlib.suppress(OSError):
            if any(each.startswith(place) for each in environment.read_bytes().split(b"\0")):
                yield int(environment.parent.name)
