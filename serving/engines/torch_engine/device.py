"""Which device an engine computes on, and how much memory is left there."""

import ctypes
import os
import sys
import threading
from pathlib import Path

import torch

from serving.engines.torch_engine.settings import TorchEngineSettings
from serving.errors import ServingError

_CGROUP_V2 = Path("/sys/fs/cgroup")


def choose_device(settings: TorchEngineSettings) -> torch.device:
    """Raises ServingError for one that this machine has not."""
    if settings.device is not None:
        try:
            device = torch.device(settings.device)
            torch.Generator(device)  # which the engine needs, and of a missing device there is none
        except RuntimeError as error:
            said = str(error).splitlines()[0]
            raise ServingError(f"[serving.torch] device {settings.device!r}: {said}") from None
        return device
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def free_bytes(device: torch.device) -> int | None:
    """Memory that may still be taken, None where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if sys.platform != "linux":
        return None
    bounds = [_meminfo_available(), _cgroup_free()]
    return min((bound for bound in bounds if bound is not None), default=None)


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
    # File pages count as used and are given back under pressure.
    return int(limit) - used + int(stat.get("inactive_file", 0))


def trim_heap() -> None:
    """Let the system have the pages that nothing lies in any more. glibc keeps those of a release
    that left between what stays; where malloc is another one, this does nothing."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


# About a quarter of a core beside a busy one. Nicer would starve beside other programs, and a
# starved thread can hold what the step loop waits for.
_STAGING_NICENESS = 5


def lower_thread_priority() -> None:
    """Make the calling thread one that takes little beside the step loop."""
    num_threads = torch.get_num_threads()
    if num_threads > 1:
        torch.set_num_threads(1)
        # That is this thread's number, and what threads to come begin with, which is set back by
        # one that has no other use for it.
        other = threading.Thread(target=torch.set_num_threads, args=(num_threads,))
        other.start()
        other.join()
    if sys.platform == "linux":
        # On Linux a nice value is a thread's own; 0 is the calling thread.
        os.setpriority(os.PRIO_PROCESS, 0, _STAGING_NICENESS)
