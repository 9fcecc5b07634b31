"""The machine of an engine: how much memory is free, and the priority of a thread."""

import os
import sys
from pathlib import Path

_CGROUP_V2 = Path("/sys/fs/cgroup")
# Beside a busy thread, the staging thread gets about a quarter of a core. With a higher nice
# value, it would starve beside other programs. A starved thread may hold a lock that the thread
# that computes needs.
_STAGING_NICENESS = 5


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


def yield_to_other_threads() -> None:
    """Make the calling thread use little of a core while other threads compute."""
    if sys.platform == "linux":
        # On Linux each thread has its own nice value. 0 is the calling thread.
        os.setpriority(os.PRIO_PROCESS, 0, _STAGING_NICENESS)
