"""Clears what git processes that were killed left behind: themselves, their locks, their objects.

It never touches refs that lead to a commit which a client was told of, nor whole objects.
"""

import contextlib
import logging
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from pipeline.hub.git_process import INCOMING_PREFIX, PLACE

logger = logging.getLogger(__name__)

GRACE_SECONDS = 5.0
"""What git has to take its locks away in, between SIGTERM and SIGKILL."""

_LOCKS = ("*.lock", "refs/**/*.lock", "objects/info/*.lock", "objects/pack/*.lock")
# Where a push is unpacked until it is known to be whole; the second is git's older name for it.
_OBJECTS = ("objects/tmp_objdir-*", "objects/incoming-*", "objects/pack/tmp_*")
# Of commits that API clients sent: their refs, and what git writes when it is ended meanwhile.
_COMMITS = (f"{INCOMING_PREFIX}*", "fast_import_crash_*")


def clear_repository(folder: Path) -> None:
    """Only safe while nothing writes to the repository: the hub's lock on it is held, or the hub
    has not started."""
    for pattern in (*_LOCKS, *_OBJECTS, *_COMMITS):
        for path in folder.glob(pattern):
            logger.warning("removing %s: the git that made it was killed", path)
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def end_processes(root: Path) -> None:
    """End the git processes of an earlier hub in `root`: they may hold locks, and move refs.

    They are found on Linux only; elsewhere a push that outlives its hub ends by itself.
    """
    pids = set(_processes(root))
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in pids:
            logger.warning("ending process %d, a git that outlived its hub", pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = time.monotonic() + GRACE_SECONDS
        while (pids := set(_processes(root))) and time.monotonic() < deadline:
            time.sleep(0.02)


def _processes(root: Path) -> Iterator[int]:
    """By their environment, which git hands on to what it starts."""
    place = os.fsencode(f"{PLACE}={root}/")
    for environment in Path("/proc").glob("[0-9]*/environ"):
        # Others' processes cannot be read; one that has ended has no environment.
        with contextlib.suppress(OSError):
            if any(each.startswith(place) for each in environment.read_bytes().split(b"\0")):
                yield int(environment.parent.name)
