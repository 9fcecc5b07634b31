"""Starts agents (`jobs/agent.py`). On Linux, agents are forked from the *fork server* of
`multiprocessing`: a process that has imported heavy modules once, so that a job need not import
them. It ends when its runner has ended. The agents go on.

The modules must not start threads, run tensor operations or initialise CUDA when they are imported,
because none of these survives a fork. A module that cannot be imported is skipped.
"""

import errno
import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess, SpawnProcess
from pathlib import Path
from typing import Any

from jobs.agent import Attempt, run
from jobs.errors import LaunchError
from jobs.job import SHORT_SPINS, thread_variables
from jobs.preload import PRELOAD
from jobs.process import IS_LINUX

logger = logging.getLogger(__name__)

_ENVIRONMENT = {
    **SHORT_SPINS,
    # A fork does not copy threads. So limit the pools to one thread: in the fork, a larger pool
    # would wait for its missing threads for ever.
    **thread_variables(1),
    # Otherwise pyarrow's memory allocator starts a thread when pyarrow is imported.
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}
_PAUSES = (0.1, 1.0)
"""The pauses between the tries to start a process, in seconds. When a fork server was killed, its
address fails at once, but a moment passes until the system says that it has ended."""
_LOCK = threading.Lock()
_Process = ForkServerProcess if IS_LINUX else SpawnProcess


class ForkServer:
    """Starts agents. Each process has one fork server; the first one that is made says which
    modules it imports."""

    def __init__(self, preload: Sequence[str]) -> None:
        if IS_LINUX:
            _ENVIRONMENT[PRELOAD] = " ".join(preload)
            forkserver.set_forkserver_preload(["jobs.agent", "jobs.preload"])
        self._warming = threading.Thread(target=self._warm, name="fork-server", daemon=True)
        self._warming.start()

    @property
    def is_ready(self) -> bool:
        """Whether the modules have been imported. Until then, `start` would wait for them."""
        return not self._warming.is_alive()

    def _warm(self) -> None:
        try:
            _start(None)
        except (OSError, EOFError) as error:
            logger.warning("The fork server could not be started: %s", error)

    def start(self, attempt: Attempt) -> None:
        """Start the agent of the attempt. Raises LaunchError."""
        for pause in (*_PAUSES, None):
            try:
                return _start(attempt)
            except (ConnectionError, EOFError) as error:
                # The fork server was killed, or could not fork. The next call starts another one if
                # necessary. A second agent of the same attempt does no harm, because an attempt
                # begins once.
                if pause is None:
                    cause = OSError(errno.EAGAIN, str(error))  # the job is tried again later
                    raise LaunchError(f"No process could be started: {error}") from cause
                time.sleep(pause)
            except OSError as error:
                raise LaunchError(f"No process could be started: {error}") from error


def _start(attempt: Attempt | None) -> None:
    if IS_LINUX:
        with _environment():
            forkserver.ensure_running()
    # The command's process inherits the name, and libraries may look for it.
    process = _Process(target=_fork_agent, args=(attempt,), name="MainProcess")
    process.start()
    process.join()
    if process.exitcode != 0:
        raise ConnectionError("the fork server has ended, or the system starts no process")


def _fork_agent(attempt: Attempt | None) -> None:
    # Fork once more. `multiprocessing` waits for its processes when the runner ends, but an agent
    # may go on.
    if attempt is not None and os.fork() == 0:
        if IS_LINUX:
            # The fork server ends when nobody has this descriptor any more.
            server: Any = forkserver._forkserver
            os.close(server._forkserver_alive_fd)
            server._forkserver_alive_fd = None
        run(attempt)


@contextmanager
def _environment() -> Iterator[None]:
    """The environment of a fork server, in which it may be started."""
    path = os.environ.get("PYTHONPATH", "")
    variables = {**_ENVIRONMENT, "PYTHONPATH": f"{Path(__file__).parents[1]}{os.pathsep}{path}"}
    with _LOCK:
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
