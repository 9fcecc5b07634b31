"""Ends services that still run although the stack that started them has ended. On Linux, this
module also makes the kernel end a child process when the parent of the child ends."""

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable

from jobs.process import ProcessIdentity, is_alive
from pipeline.paths import Home
from pipeline.stack_record import last_record

STOP_SECONDS = 15.0
"""A service that does not end within this many seconds after SIGTERM gets SIGKILL."""


def end_orphans(home: Home) -> None:
    """End the children that a killed stack has left running, and remove the record of this stack.

    The caller must hold the lock of the state folder. Without the lock, another stack may be
    running, and this function would end the children of that stack.
    """
    record = last_record(home)
    for child in reversed(record.children if record else ()):
        if child.process is not None:
            _end(child.process)
    home.stack_file.unlink(missing_ok=True)


def _end(process: ProcessIdentity) -> None:
    deadline = time.monotonic() + STOP_SECONDS
    while is_alive(process):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGTERM if time.monotonic() < deadline else signal.SIGKILL)
        time.sleep(0.05)


def end_with_parent(parent: int) -> Callable[[], None]:
    """Returns a function for `preexec_fn` of `subprocess.Popen` (Linux only). The new child calls
    the returned function before it runs its program. The returned function asks the kernel to send
    SIGTERM to the child when the child's parent ends, or when the thread that called `Popen` ends.
    Without this signal, the child would run on after the end of its parent, and the child's port
    would stay in use."""

    def end_with_parent() -> None:
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # the parent ended before the call above
            os._exit(1)

    return end_with_parent
