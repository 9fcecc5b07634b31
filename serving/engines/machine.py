"""The machine of an engine: tells how much memory is free, and lowers the priority of a thread."""

import os
import sys
from pathlib import Path

import torch

_CGROUP_V2 = Path("/sys/fs/cgroup")
# Beside a busy thread, the staging thread gets about a quarter of a core. With a higher nice
# value, it would starve beside other programs. A starved thread may hold a lock that the thread
# that computes needs.
_STAGING_NICENESS = 5


def free_bytes(device: torch.device) -> int | None:
    """The memory that can still be allocated; None if the system does not tell."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if sys.platform != "linux":
        return None
    bounds = [_meminfo_available(), _cgroup_free()]
    return min((bound for bound in bounds if bound is not None), default=None)


def yield_to_other_threads() -> None:
    """Make the calling thread use little of a core while other threads compute."""
    if sys.platform == "linux":
        # On Linux each thread has its own nice value. 0 is the calling thread.
        os.setpriority(os.PRIO_PROCESS, 0, _STAGING_NICENESS)


def _meminfo_available() -> int | None:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _cgroup_free() -> int | None:
    try:
        limit = (_CGROUP_V2 / "memory.max").read_text().strip()
        used = int((_CGROUP_V2 / "memory.current").read_text())
        stat = dict(line.split() for line in (_CGROUP_V2 / "memory.stat").read_text().splitlines())
    except FileNotFoundError:
        return None
    if limit == "max":
        return None
    # The pages of files count as used, but the kernel frees them when memory is needed.
    return int(limit) - used + int(stat.get("inactive_file", 0))
