"""Whether others compute on this machine, as a lock that they share tells (flock(2)).

A step that computes on every core waits, in each of its operations, for the thread whose core
another program has at the moment.
"""

import fcntl
import os
import time
from pathlib import Path

_CHECK_SECONDS = 0.1


class BusyLock:
    """For one thread. Without a file there are none."""

    def __init__(self, lock: Path | None) -> None:
        self._lock = lock
        self._is_held = False
        self._next_check = 0.0

    @property
    def is_held(self) -> bool:
        """As it was at most a tenth of a second ago."""
        if self._lock is not None and time.monotonic() >= self._next_check:
            self._is_held = _is_held(self._lock)
            self._next_check = time.monotonic() + _CHECK_SECONDS
        return self._is_held


def _is_held(lock: Path) -> bool:
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False  # nobody has made it
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False  # there are no locks on that file system
    finally:
        os.close(descriptor)
    return False
