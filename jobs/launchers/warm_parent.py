"""`WarmParent`: the runner's side of `jobs/launchers/warm.py`. Starts it again when it dies."""

import contextlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from jobs.environment import thread_variables
from jobs.launchers.supervise import Request

logger = logging.getLogger(__name__)

_NO_BACKGROUND_THREADS = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}
"""pyarrow's allocator has one otherwise, from its import on."""

_MAX_DEATHS_BEFORE_READY = 3


class WarmParent:
    """Call `tend` often; nothing here waits. `off` is for good: it cannot import its modules."""

    state: Literal["importing", "ready", "off"]
    generation: int
    """Counts the processes; a request that an earlier one took may be lost with it."""

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self._command = [sys.executable, "-m", "jobs.launchers.warm", *modules]
        # One-thread pools: a pool with threads, forked, waits for ever for those it left behind.
        self._environment = {
            **environment_for_jobs_package(environment),
            **thread_variables(1),
            **_NO_BACKGROUND_THREADS,
        }
        self._log = log
        self._deaths = 0
        self.generation = 0
        self._process: subprocess.Popen[bytes] | None = None
        self.state = "off"
        self._start()

    def _start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # Ctrl-C at the runner's terminal is for the runner
            )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self.generation += 1
        self.state = "importing"

    def tend(self) -> None:
        """Notice that it is ready, or dead; start it again in that case."""
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
            self._give_up(f"it ended with {code} while importing; {self._log} says why")
            return
        logger.warning("The warm parent ended with %s; starting another.", code)
        self._start()

    def _read_answer(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            return
        ready = json.loads(line)
        if ready["threads"]:
            self._give_up(f"its modules began threads when imported: {', '.join(ready['threads'])}")
            self.close()
            return
        logger.info("The warm parent is ready after %.1f s.", ready["seconds"])
        self.state = "ready"

    def _give_up(self, reason: str) -> None:
        logger.warning("Jobs start without a warm parent from now on: %s.", reason)
        self.state = "off"

    def send(self, request: Request) -> None:
        """Have a process forked for the request. Where it dies first, its generation ends."""
        assert self.state == "ready" and self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(request.to_json().encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return  # `tend` will see that it is dead

    def close(self) -> None:
        """End it; the jobs that it forked go on."""
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
        with contextlib.suppress(BrokenPipeError):  # what is left in its buffer is sent again
            process.stdin.close()


def environment_for_jobs_package(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment`, with the folder of this package's parent where Python looks for modules."""
    root = str(Path(__file__).parents[2])
    path = environment.get("PYTHONPATH")
    return {**environment, "PYTHONPATH": f"{root}{os.pathsep}{path}" if path else root}
