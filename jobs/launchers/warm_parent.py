"""`WarmParent`: manages the warm parent, a process from which jobs are forked
(`jobs/launchers/warm.py`). `WarmParent` starts this process, sends requests to it, and starts
another warm parent if this process dies."""

import contextlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from jobs.environment import SHORT_SPINS, thread_variables
from jobs.launchers.supervise import Request

logger = logging.getLogger(__name__)

_NO_BACKGROUND_THREADS = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}
"""Without this variable, pyarrow's memory allocator starts a thread when pyarrow is imported. The
warm parent must not have threads, because a process with threads cannot be forked safely."""

_MAX_DEATHS_BEFORE_READY = 3
"""If this many warm parents in a row die before they are ready, no further warm parent is
started."""


class WarmParent:
    """Starts and replaces the warm parent, and sends requests to it. The caller must call
    `poll_processes` many times a second. `close` kills the warm parent and waits until its process
    is gone. Raises OSError if the file `log` cannot be written."""

    state: Literal["importing", "ready", "off"]
    """`off` means that there is no warm parent and none will be started. There are five possible
    reasons: the modules cannot be imported, the modules start threads during their import,
    `_MAX_DEATHS_BEFORE_READY` warm parents in a row died before they were ready, the operating
    system could not start the process, or `close` was called."""
    generation: int
    """The number of attempts to start a warm parent. When this number grows, the former warm parent
    is dead, and the requests that were sent to it may be lost."""

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self._command = [sys.executable, "-m", "jobs.launchers.warm", *modules]
        # Limit thread pools to one thread. A fork does not copy threads, so in the child a larger
        # pool would wait for its missing threads for ever.
        self._environment = {
            **SHORT_SPINS,
            **environment_for_jobs_package(environment),
            **thread_variables(1),
            **_NO_BACKGROUND_THREADS,
        }
        self._log = log
        self._deaths = 0
        self.generation = 0
        self._process: subprocess.Popen[bytes] | None = None
        self.state = "off"
        # If the log cannot be written, no job can run in this folder either. So raise the OSError.
        log.open("ab").close()
        self._start()

    def _start(self) -> None:
        """Start a warm parent. If the operating system cannot start one, turn the warm parent
        off."""
        # If a former warm parent has died, it may have lost requests. The launcher sees that
        # `generation` has grown, and sends these requests again.
        self.generation += 1
        try:
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(
                    self._command,
                    env=self._environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    # A session of its own, so that Ctrl-C in the terminal reaches only the runner.
                    start_new_session=True,
                )
        except OSError as error:
            self._turn_off(f"the warm parent cannot be started: {error}")
            return
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self.state = "importing"

    def poll_processes(self) -> None:
        """Check whether the warm parent has become ready or has died. If it has died, start another
        one, or set the state to `off` for one of the reasons that `state` lists."""
        if self._process is None:
            return
        code = self._process.poll()
        if code is None:
            if self.state == "importing":
                self._read_answer(self._process)
            return
        self._close_pipes(self._process)
        self._process = None
        self._deaths = 0 if self.state == "ready" else self._deaths + 1
        if self.state == "importing" and (code > 0 or self._deaths >= _MAX_DEATHS_BEFORE_READY):
            self._turn_off(
                f"the warm parent exited with {code} while it imported its modules; see {self._log}"
            )
            return
        logger.warning("The warm parent exited with %s; another one is started.", code)
        self._start()

    def _read_answer(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            return
        ready = json.loads(line)
        if ready["threads"]:
            threads = ", ".join(ready["threads"])
            self._turn_off(f"the preloaded modules started threads during their import: {threads}")
            self.close()
            return
        logger.info("The warm parent is ready after %.1f s.", ready["seconds"])
        self.state = "ready"

    def _turn_off(self, reason: str) -> None:
        logger.warning("Jobs start without a warm parent from now on: %s.", reason)
        self.state = "off"

    def send(self, request: Request) -> None:
        """Ask the warm parent to fork a process for the request. If `generation` changes before the
        process has recorded its start, send the request again: the warm parent may have died before
        it forked the process."""
        assert self.state == "ready" and self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(request.to_json().encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return  # `poll_processes` will find that the warm parent is dead

    def close(self) -> None:
        """End the warm parent. The jobs that were forked from the warm parent continue."""
        self.state = "off"
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._close_pipes(self._process)
            self._process = None

    @staticmethod
    def _close_pipes(process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None and process.stdout is not None
        process.stdout.close()
        # `stdin.close` first sends what Python's buffer still holds. The buffer holds a request
        # only if an earlier send failed, because the warm parent was dead. So this send fails too.
        # Ignore the error: the launcher sends the request again, to the next warm parent.
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()


def environment_for_jobs_package(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` with a PYTHONPATH that names the folder of the package `jobs`."""
    root = str(Path(__file__).parents[2])
    path = environment.get("PYTHONPATH")
    return {**environment, "PYTHONPATH": f"{root}{os.pathsep}{path}" if path else root}
