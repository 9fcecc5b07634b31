"""The warm parent: a process that imports heavy modules once, and then forks a process for each
job. So the jobs do not wait for these imports.

The modules must not run tensor operations or initialise CUDA during their import, because tensor
operations or CUDA would then fail in the forked processes. The warm parent reads requests from
standard input, where each request is one line of JSON. It ends when standard input is closed.
`jobs/launchers/warm_parent.py` starts the warm parent, and limits its thread pools to one thread.
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
    os.dup2(2, 1)  # what imported modules print must go to the log, not into the pipe of answers
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    began = time.monotonic()
    for module in modules:
        importlib.import_module(module)
    # Exclude the imported objects from garbage collection. The forked processes share the memory
    # pages of these objects. A garbage collection in a forked process would write to these pages,
    # so the kernel would have to copy them for that process.
    gc.freeze()
    ready = {"threads": other_threads(), "seconds": time.monotonic() - began}
    os.write(answers, json.dumps(ready).encode() + b"\n")
    signal.signal(signal.SIGCHLD, _reap)
    for line in sys.stdin:
        request = Request.from_json(line)
        if os.fork() == 0:
            os.close(answers)
            # In this process, `supervise` replaces standard input, so that only the warm parent
            # reads requests from the pipe. Then `supervise` forks once more. It returns only in the
            # new process, which will run the job's command.
            run_job = supervise(request, in_place=True)
            break
    else:
        return
    run_job()


def other_threads() -> list[str]:
    """The names of all threads of this process except the main thread. If there are such threads, a
    fork is unsafe: the child gets copies of the locks that the threads hold, but it does not get
    the threads that would release these locks."""
    try:
        tasks = [
            task for task in Path("/proc/self/task").iterdir() if task.name != str(os.getpid())
        ]
    except FileNotFoundError:
        return [thread.name for thread in threading.enumerate()[1:]]
    return [(task / "comm").read_text(errors="replace").strip() for task in tasks]


def _reap(*_: object) -> None:
    try:
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass
    except ChildProcessError:
        pass


if __name__ == "__main__":
    main(sys.argv[1:])
