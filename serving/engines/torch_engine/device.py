"""Chooses the device of the engine, tells whether other programs compute, and lets a thread use
one core only."""

import ctypes
import fcntl
import os
import threading
import time
from pathlib import Path

import torch

from serving.engines.machine import yield_to_other_threads
from serving.engines.torch_engine.settings import TorchEngineSettings
from serving.errors import ServingError, first_line

_CHECK_SECONDS = 0.1


def choose_device(settings: TorchEngineSettings) -> torch.device:
    """Raises ServingError if the configured device does not exist on this machine."""
    if settings.device is not None:
        try:
            device = torch.device(settings.device)
            torch.Generator(device)  # fails if the device does not exist
        except RuntimeError as error:
            reason = first_line(error)
            raise ServingError(f"[serving.torch] device {settings.device!r}: {reason}") from None
        return device
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def return_unused_memory(device: torch.device) -> None:
    """Return to the system what allocators keep after a release is unloaded. torch keeps blocks of
    a GPU's memory, which `free_bytes` does not count as free. glibc keeps unused pages of the heap
    between those that are still in use; another malloc is left alone."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
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
