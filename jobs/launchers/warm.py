"""The warm parent: imports heavy modules once, then forks a process for each job.

It runs no tensor operation and touches no CUDA, so that a child can do both, with threads of its
own. It reads requests from standard input, a line of JSON each, and ends when that is closed.
Started by `jobs/launchers/warm_parent.py` with one-thread pools.
"""

import importlib
import json
import os
import signal
import sys
import threading
import time

from jobs.launchers.supervise import Request, supervise


def main(modules: list[str]) -> None:
    answers = os.dup(1)
    os.dup2(2, 1)  # a module that prints must not speak for this process
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    began = time.monotonic()
    for module in modules:
        importlib.import_module(module)
    ready = {"num_threads": num_threads(), "seconds": time.monotonic() - began}
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


def num_threads() -> int:
    """Of this process, in any language: a fork copies one thread and the locks of all others."""
    try:
        return len(os.listdir("/proc/self/task"))
    except FileNotFoundError:
        return threading.active_count()


def _reap(*_: object) -> None:
    try:
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass
    except ChildProcessError:
        pass


if __name__ == "__main__":
    main(sys.argv[1:])
