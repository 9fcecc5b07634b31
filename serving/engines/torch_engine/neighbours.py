"""Whether others compute on this machine, as a lock that they share tells (flock(2)).

A step that computes on every core waits, in each of its operations, for the thread whose core
another program has at the moment.
"""

import fcntl
import os
import time
from pathlib import Path

_LOOK_SECONDS = 0.1


class Neighbours:
    """For one thread. Without a file there are none."""

    def __init__(self, lock: Path | None) -> None:
        self._lock = lock
        self._are_at_work = False
        self._look_at = 0.0

    @property
    def are_at_work(self) -> bool:
        """As it was at most a tenth of a second ago."""
        if self._lock is not None and time.monotonic() >= self._look_at:
            self._are_at_work = _is_held(self._lock)
            self._look_at = time.monotonic() + _LOOK_SECONDS
        return self._are_at_work


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
