"""Tells whether other programs on this machine compute. They hold a lock on a file meanwhile
(flock(2)).

The engine then leaves one core to them. If a step used every core, each of its operations would
wait for the thread whose core another program occupies.
"""

import fcntl
import os
import time
from pathlib import Path

_CHECK_SECONDS = 0.1


class BusyLock:
    """Use it from one thread only. Without a file, the lock is never held."""

    def __init__(self, lock: Path | None) -> None:
        self._lock = lock
        self._is_held = False
        self._next_check = 0.0

    @property
    def is_held(self) -> bool:
        """Whether a program held the lock at the last check, at most 0.1 seconds ago."""
        if self._lock is not None and time.monotonic() >= self._next_check:
            self._is_held = _is_held(self._lock)
            self._next_check = time.monotonic() + _CHECK_SECONDS
        return self._is_held


def _is_held(lock: Path) -> bool:
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False  # no program has created the file
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False  # the file system does not support locks
    finally:
        os.close(descriptor)
    return False
