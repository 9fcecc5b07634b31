"""The machine of an engine: tells how much memory is free and whether other programs compute, and
lowers the priority of a thread."""

import ctypes
import fcntl
import os
import sys
import threading
import time
from pathlib import Path

import torch

_CGROUP_V2 = Path("/sys/fs/cgroup")
# Beside a busy thread, the staging thread gets about a quarter of a core. With a higher nice
# value, it would starve beside other programs. A starved thread may hold a lock that the thread
# that computes needs.
_STAGING_NICENESS = 5
_CHECK_SECONDS = 0.1


def free_bytes() -> int | None:
    """The memory that can still be allocated; None if the system does not tell."""
    if sys.platform != "linux":
        return None
    fields = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    available = next(int(size) for name, size, *_ in fields if name == "MemAvailable:") * 1024
    try:
        limit = (_CGROUP_V2 / "memory.max").read_text().strip()
        used = int((_CGROUP_V2 / "memory.current").read_text())
        stat = dict(line.split() for line in (_CGROUP_V2 / "memory.stat").read_text().splitlines())
    except FileNotFoundError:
        return available
    if limit == "max":
        return available
    # The pages of files count as used, but the kernel frees them when memory is needed.
    return min(available, int(limit) - used + int(stat.get("inactive_file", 0)))


def return_unused_memory() -> None:
    """Return to the system what glibc keeps after a release is unloaded: unused pages of the heap
    between those that are still in use. Another malloc is left alone."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


class BusyLock:
    """Tells whether other programs on this machine compute. They hold a lock on a file meanwhile
    (flock(2)). Use it from one thread only. Without a file, the lock is never held.

    The engine then leaves one core to them. If a step used every core, each of its operations would
    wait for the thread whose core another program occupies.
    """

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
        with lock.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False  # no program has created the file, or the file system has no locks
    return False


def yield_to_other_threads() -> None:
    """Make the calling thread use little of a core while other threads compute."""
    if sys.platform == "linux":
        # On Linux each thread has its own nice value. 0 is the calling thread.
        os.setpriority(os.PRIO_PROCESS, 0, _STAGING_NICENESS)


def lower_thread_priority() -> None:
    """Make the calling thread use one core only, and little of it while the step loop computes."""
    num_threads = torch.get_num_threads()
    if num_threads > 1:
        torch.set_num_threads(1)
        # The call above sets two numbers: the one of this thread, and the default of threads that
        # start later. Another thread restores the default.
        other = threading.Thread(target=torch.set_num_threads, args=(num_threads,))
        other.start()
        other.join()
    yield_to_other_threads()
