"""The warm parent: imports heavy modules once, then forks a process for each job.

It runs no tensor operation and touches no CUDA, so that a child can do both, with threads of its
own. It reads requests from standard input, a line of JSON each, and ends when that is closed.
Started by `jobs/launchers/warm_parent.py` with one-thread pools.
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
    os.dup2(2, 1)  # a module that prints must not speak for this process
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    began = time.monotonic()
    for module in modules:
        importlib.import_module(module)
    gc.freeze()  # what was imported lives for ever: a collection in a child would copy its pages
    ready = {"threads": other_threads(), "seconds": time.monotonic() - began}
    os.write(answers, json.dumps(ready).encode() + b"\n")
    signal.signal(signal.SIGCHLD, _reap)
    for line in sys.stdin:
        request = Request.from_json(line)
        if os.fork() == 0:
            os.close(answers)
            # Standard input is replaced in here, so that the runner's pipe has one reader.
            become = supervise(request, in_place=True)
            break
    else:
        return
    become()


def other_threads() -> list[str]:
    """Threads of any language beside this one: a fork copies the locks that they hold, not them."""
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
