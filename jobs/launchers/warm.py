"""The warm parent: imports heavy modules once, then forks a process for each job.

The warm parent runs no tensor operation and does not initialise CUDA. If it did, its forked
children could do neither. It reads requests from standard input, one line of JSON each, and ends
when standard input is closed. `jobs/launchers/warm_parent.py` starts it, and limits all thread
pools to one thread.
"""

import gc
import importlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

from jobs.launchers.supervise import Request, supervise


def main(modules: list[str]) -> None:
    answers = os.dup(1)
    os.dup2(2, 1)  # so that nobody takes the output of an imported module for an answer
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    began = time.monotonic()
    for module in modules:
        importlib.import_module(module)
    # Exclude the imported objects from garbage collection. A collection in a child would write to
    # the shared memory pages, and each written page would be copied.
    gc.freeze()
    ready = {"threads": other_threads(), "seconds": time.monotonic() - began}
    os.write(answers, json.dumps(ready).encode() + b"\n")
    signal.signal(signal.SIGCHLD, _reap)
    for line in sys.stdin:
        request = Request.from_json(line)
        if os.fork() == 0:
            os.close(answers)
            # `supervise` replaces the child's standard input, so only the warm parent reads the
            # pipe.
            become = supervise(request, in_place=True)
            break
    else:
        return
    become()


def other_threads() -> list[str]:
    """Names of all threads of this process except the main thread. A fork is unsafe if there are
    such threads: the child gets copies of their locks, but not the threads that would release the
    locks."""
    try:
        tasks = [
            task for task in Path("/proc/self/task").iterdir() if task.name != str(os.getpid())
        ]
    except FileNotFoundError:
        return [thread.name for thread in threading.enumerate()[1:]]
    return [(task / "comm").read_text().strip() for task in tasks]


def _reap(*_: object) -> None:
    try:
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass
    except ChildProcessError:
        pass


if __name__ == "__main__":
    main(sys.argv[1:])
