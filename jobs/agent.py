"""The *agent* of an attempt: a process that runs the command of one attempt of a job. It leads the
session of the command (setsid(2)), writes the log, sends the heartbeats, stops the command when it
must end, and records how the attempt ended. An agent goes on when its runner dies.

If the attempt is not the current one of its job any more, its calls raise LeaseLost. The agent then
ends the command and leaves everything else alone.

On a runner's machine, agents are forked on Linux from the *fork server* of `multiprocessing`: a
process that has imported heavy modules once, so that a job need not import them. It ends when its
runner has ended. The agents go on. The modules must not start threads, run tensor operations or
initialise CUDA when they are imported, because none of these survives a fork.

Elsewhere, an engine such as Slurm starts `python -m jobs.agent`, with the variables JOB_URL and
JOB_TICKET.
"""

import atexit
import contextlib
import errno
import fcntl
import gc
import logging
import math
import multiprocessing
import os
import runpy
import secrets
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess, SpawnProcess
from pathlib import Path
from typing import Any, NoReturn

from jobs.attempt import (
    Calls,
    Exit,
    StopReason,
    lay_out,
    outcome_of_exit,
    time_limit,
    until_it_works,
)
from jobs.attempt_on_hub import AttemptOnHub
from jobs.errors import TEMPORARY_FAILURE, LaunchError, LeaseLost, StoreError, is_temporary
from jobs.folder import COMPUTING, LOG
from jobs.job import Job, job_environment
from jobs.process import (
    IS_LINUX,
    ProcessIdentity,
    die_with_parent,
    identify,
    lower_priority,
    name_of,
    num_killed_for_memory,
    prctl,
    send_signal,
    signal_session,
)
from jobs.settings import JobsSettings
from jobs.spec import JOB_TICKET, JOB_URL

logger = logging.getLogger(__name__)

BEAT_NOW = signal.SIGUSR1
"""A runner sends this signal to an agent when the agent should call `beat` at once, for example
because somebody has cancelled the job. SIGTERM means that the runner is being stopped: the agent
ends the command, and the job gets another attempt."""

_PR_SET_CHILD_SUBREAPER = 36
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_SIGNALS_OF_AGENT = (*_STOP_SIGNALS, signal.SIGCHLD, signal.SIGALRM, BEAT_NOW)
"""An agent blocks them, and takes one after another from those that wait (sigwait(3))."""
_SHORTEST_PAUSE = 0.001
_LAST_SIGNAL_SECONDS = 2.0
"""If the command was ended by SIGTERM, its agent waits this long for a SIGTERM of its own."""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """What an agent runs. It may hold secrets, so it is never written to disk."""

    job: Job
    calls: Calls
    jobs_dir: Path
    env: Mapping[str, str]
    """All environment variables of the command."""
    settings: JobsSettings

    @property
    def job_dir(self) -> Path:
        """The working folder of the command."""
        return self.jobs_dir / self.job.id


def run(attempt: Attempt) -> None:
    """Run the attempt. Call this function only in a process that was started for this purpose: it
    becomes the agent, and exits when the attempt has ended.

    The agent forks the process of the command. In that process, this function returns or raises
    when the command has ended, if it is a Python module. The caller must then exit as Python does.
    """
    with contextlib.suppress(PermissionError):  # it leads one already
        os.setsid()
    # Keep the objects of the preloaded modules out of garbage collection, which would write to
    # their memory. Both processes share this memory with the process that has imported the modules.
    gc.freeze()
    agent = os.getpid()
    # The command starts only after the agent has written to `go`. Before that, the agent asks
    # whether this attempt may begin.
    wait_here, go = os.pipe()
    errors, report = os.pipe()
    # Before the fork: a stop signal that arrives before the command's process has restored the
    # default action waits until then, instead of being lost (on Linux).
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS_OF_AGENT)
    # Fork before the agent opens the store: its connections do not survive a fork.
    command_pid = os.fork()
    if command_pid == 0:
        os.close(go)
        os.close(errors)
        die_with_parent(agent)
        for number in _STOP_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS_OF_AGENT)
        if not os.read(wait_here, 1):
            os._exit(1)
        os.close(wait_here)
        _run_command(attempt, report)
        return
    os.close(wait_here)
    os.close(report)
    _Agent(attempt, command_pid, go=go, errors=errors).run()


class _Agent:
    def __init__(self, attempt: Attempt, command_pid: int, *, go: int, errors: int) -> None:
        self._attempt = attempt
        self._command_pid = command_pid
        self._go = go
        self._errors = errors
        me = identify(os.getpid())
        assert me is not None
        self._me: ProcessIdentity = me
        self._exit: Exit | None = None
        """How the command ended. None while it runs."""
        self._killed_for_memory = num_killed_for_memory()
        self._stop_reason: StopReason | None = None
        self._kill_at = math.inf
        """When the command is killed. This time and the next two are by the monotonic clock."""
        self._deadline = math.inf
        self._next_beat = 0.0
        # The system forgets signals of children that nobody handles, also if they are blocked.
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def run(self) -> NoReturn:
        try:
            if prctl is not None:
                # If the command leaves processes behind, this process becomes their parent.
                prctl(_PR_SET_CHILD_SUBREAPER, 1)
            until_it_works(f"Job {self._attempt.job.id}", self._begin)
            self._watch()
            self._end_processes()
            until_it_works(f"Job {self._attempt.job.id}", self._finish)
        except LeaseLost as error:
            logger.warning("%s", error)
        except BaseException:
            logger.exception("The agent of job %s failed.", self._attempt.job.id)
        finally:
            self._end_processes()
            os._exit(0)

    def _begin(self) -> None:
        attempt, job = self._attempt, self._attempt.job
        attempt.calls.start(name_of(self._me))
        try:
            lay_out(attempt.job_dir, job)
            _hold_computing_lock(attempt.jobs_dir / COMPUTING)
        except OSError as error:
            code = TEMPORARY_FAILURE if is_temporary(error) else 1
            self._exit = Exit(code=code, error=f"{job.id} could not start: {error}")
            return
        os.write(self._go, b"1")

    def _watch(self) -> None:
        """Wait until the command has ended. Meanwhile send heartbeats, and stop the command when it
        must end."""
        while self._exit is None:
            now = time.monotonic()
            if now >= self._next_beat:
                self._beat(now)
            if now >= self._deadline:
                self._stop("timeout", now)
            if now >= self._kill_at:
                # Kill again every second: this kill may miss a process that was just being forked.
                self._kill_at = now + 1.0
                signal_session(self._me, signal.SIGKILL)
            pause = min(self._next_beat, self._deadline, self._kill_at) - now
            signal.setitimer(signal.ITIMER_REAL, max(_SHORTEST_PAUSE, pause))
            received = signal.sigwait(_SIGNALS_OF_AGENT)
            if received == BEAT_NOW:
                self._next_beat = 0.0
            if received == signal.SIGTERM:
                self._stop("shutdown", time.monotonic())
            self._reap()
        if self._exit.code == -signal.SIGTERM and self._stop_reason is None:
            # An engine that stops a job signals all its processes, and this one perhaps last.
            signal.setitimer(signal.ITIMER_REAL, _LAST_SIGNAL_SECONDS)
            if signal.sigwait((signal.SIGTERM, signal.SIGALRM)) == signal.SIGTERM:
                self._stop_reason = "shutdown"

    def _beat(self, now: float) -> None:
        self._next_beat = now + self._attempt.settings.heartbeat_seconds
        try:
            orders = self._attempt.calls.beat()
        except StoreError as error:
            logger.error("%s Trying again.", error)
            return
        if self._stop_reason is None and orders.seconds_left is not None:
            self._deadline = now + orders.seconds_left
        if orders.cancel:
            self._stop("cancel", now)

    def _stop(self, reason: StopReason, now: float) -> None:
        if self._stop_reason is None:
            logger.info("Job %s is being stopped (%s).", self._attempt.job.id, reason)
            self._stop_reason = reason
            self._deadline = math.inf
            self._kill_at = now + self._attempt.settings.kill_grace_seconds
            signal_session(self._me, signal.SIGTERM)

    def _reap(self) -> None:
        """Collect the processes that have ended: the command, and processes that the command has
        left."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
                if ended[0] == self._command_pid:
                    # Nobody has the other end any more, so this does not wait.
                    error = os.read(self._errors, 4096).decode(errors="replace")
                    self._exit = Exit(
                        code=os.waitstatus_to_exitcode(ended[1]),
                        error=error or None,
                        memory_ran_out=num_killed_for_memory() > self._killed_for_memory,
                    )

    def _finish(self) -> None:
        assert self._exit is not None
        attempt, job = self._attempt, self._attempt.job
        limit = time_limit(job, attempt.settings)
        result = outcome_of_exit(job, attempt.job_dir, self._exit, self._stop_reason, limit)
        attempt.calls.finish(result)

    def _end_processes(self) -> None:
        """Kill the command and all processes that it has started. When one of them ends, its
        children become children of this process, so repeat until no child is left."""
        signal_session(self._me, signal.SIGKILL)
        while True:
            for child in _children():
                send_signal(child, signal.SIGKILL)
            try:
                os.wait()
            except ChildProcessError:
                return


def _hold_computing_lock(path: Path) -> None:
    """Take the shared lock that tells completion servers that a job runs."""
    # Never close this descriptor: the lock must be held until this process ends.
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    with contextlib.suppress(OSError):  # this file system does not support locks
        fcntl.flock(lock, fcntl.LOCK_SH)


def _children() -> list[int]:
    me = os.getpid()
    if not IS_LINUX:
        return []
    return [int(pid) for pid in Path(f"/proc/{me}/task/{me}/children").read_text().split()]


def _run_command(attempt: Attempt, report: int) -> None:
    command = attempt.job.spec.command
    is_module = IS_LINUX and command[:2] == (sys.executable, "-m")
    try:
        nothing = os.open(os.devnull, os.O_RDONLY)
        output = os.open(attempt.job_dir / LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        for source, target in ((nothing, 0), (output, 1), (output, 2)):
            os.dup2(source, target)
        os.chdir(attempt.job_dir)
        lower_priority(attempt.settings.niceness)
        if not is_module:
            # Python ignores these signals; other programs expect them.
            for number in (signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(number, signal.SIG_DFL)
            os.execvpe(command[0], command, attempt.env)
    except (OSError, ValueError) as error:
        cause = error.strerror if isinstance(error, OSError) else error
        message = f"{command[0]} could not be started: {cause}."
        print(message, file=sys.stderr, flush=True)
        os.write(report, message.encode())
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)
    # Not in the `try`: an error of the module is no failed start.
    os.close(report)
    _run_module(command[2], command[3:], attempt)


def _run_module(module: str, arguments: Sequence[str], attempt: Attempt) -> None:
    """Run `python -m module args` in this interpreter, with the modules that the fork server has
    imported."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(attempt.env)
    path = attempt.env.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:1] = [str(attempt.job_dir), *filter(None, path)]
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    # Processes that the command starts must be forked from it, and not from the fork server.
    multiprocessing.set_start_method(None, force=True)
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()  # `multiprocessing` ends its processes without them


# How agents are started


PRELOAD = "HOTPUSH_PRELOAD"
"""This variable names the modules that `jobs/preload.py` imports in the fork server."""
_PAUSES = (0.1, 1.0)
"""The pauses between the tries to start a process, in seconds. When a fork server was killed, its
address fails at once, but a moment passes until the system says that it has ended."""
_Process = ForkServerProcess if IS_LINUX else SpawnProcess


class ForkServer:
    """Starts agents. Each process has one fork server; the first one that is made says which
    modules it imports."""

    def __init__(self, preload: Sequence[str]) -> None:
        if IS_LINUX:
            # Agents on this machine use the store. If it is here, none has to import it.
            os.environ[PRELOAD] = " ".join(("jobs.store", *preload))
            forkserver.set_forkserver_preload(["jobs.preload"])
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


# An agent elsewhere


def main() -> int:
    """The program of an agent elsewhere. Returns 0 when the attempt has ended, however it ended,
    and if another agent has begun it: an engine that starts a program again does no harm."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs each call
    try:
        url, ticket = os.environ.pop(JOB_URL), os.environ.pop(JOB_TICKET)
    except KeyError as missing:
        print(f"{missing} is not set: a runner sets it for the agents of attempts", file=sys.stderr)
        return 2
    folder = tempfile.mkdtemp(prefix="hotpush-")
    # The agent must lead a session, and a process that a shell has started cannot. So fork.
    agent = os.fork()
    if agent == 0:
        _run_elsewhere(url, ticket, Path(folder))
        return 0
    for number in _STOP_SIGNALS:
        signal.signal(number, lambda *_: send_signal(agent, signal.SIGTERM))
    os.waitpid(agent, 0)
    shutil.rmtree(folder, ignore_errors=True)
    return 0


def _run_elsewhere(url: str, ticket: str, folder: Path) -> None:
    me = identify(os.getpid())
    assert me is not None
    # A runner must not take it for a process of its own machine: a container may have its name. And
    # nobody who finds the ticket may guess the handle, with which it would start the agent again.
    handle = f"elsewhere:{secrets.token_hex(16)}@{name_of(me)}"
    try:
        hub = until_it_works(url, lambda: AttemptOnHub(url, ticket, folder, handle))
    except (LeaseLost, StoreError) as error:
        logger.warning("%s", error)
        os._exit(0)
    started = hub.started
    job, settings = started.job, started.settings
    # A command names `python`: it is the one that runs this agent.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    here = {"HF_ENDPOINT": hub.hub_url, "DATASET_ENDPOINT": hub.hub_url, "PATH": path}
    env = job_environment(
        job,
        folder / job.id,
        {**os.environ, **here, JOB_URL: url, **started.variables},
        num_threads=settings.threads(),
        unsealed=started.unsealed,
    )
    run(Attempt(job=job, calls=hub, jobs_dir=folder, env=env, settings=settings))


if __name__ == "__main__":
    sys.exit(main())
