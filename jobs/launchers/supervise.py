"""The *leader* of a job's session (setsid(2)): the process that starts the command, waits until the
command has ended, and records the command's exit code.

The leader is a separate process, so that it can record the exit code even if the runner dies. When
the command has ended, the leader also kills the processes that the command has left running (only
on Linux).

If this module is run as a program, it reads one request from standard input. The module imports no
third-party package, so that it starts quickly.
"""

import contextlib
import fcntl
import json
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from jobs.folder import (
    COMPUTING,
    EXIT,
    LOCK,
    LOG,
    PROCESS,
    PROCESS_FIELDS,
    read_record,
    write_atomically,
)
from jobs.launchers.process import (
    IS_LINUX,
    ProcessIdentity,
    die_with_parent,
    identify,
    lower_priority,
    prctl,
    signal_session,
)

_PR_SET_CHILD_SUBREAPER = 36
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_LOCK_SECONDS = 10.0
"""How long the leader of an attempt waits for the leader of the previous attempt to end. After this
time, the waiting leader ends without starting the command."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to start for one attempt. The launcher sends the request over a pipe, as one line of
    JSON. The request must not be written to disk, because `env` may hold secrets."""

    job_dir: str
    attempt: int
    command: list[str]
    env: dict[str, str]
    niceness: int

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> "Request":
        return cls(**json.loads(line))


def supervise(request: Request, *, in_place: bool) -> Callable[[], None]:
    """Fork the command's process and supervise it. Call this function only in a process that was
    started for this purpose.

    The calling process becomes the leader. In the leader, this function never returns: the leader
    exits when the command has ended.

    In the forked process, this function returns a second function, which the forked process must
    call to run the command. With `in_place`, the command must have the form `python -m …`; it runs
    in the same interpreter, with the modules that are already imported. Otherwise the command
    replaces the forked process.
    """
    with contextlib.suppress(PermissionError):  # this process already leads a session
        os.setsid()
    for number in _STOP_SIGNALS:
        # Ignore stop signals, which are meant for the command. The leader must stay alive to record
        # the exit code.
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    job_dir = Path(request.job_dir)
    _redirect_output(job_dir / LOG)
    os.chdir(job_dir)
    _claim_attempt(job_dir, request.attempt)
    _hold_computing_lock(job_dir.parent / COMPUTING)
    if prctl is not None:
        # If the command leaves processes behind when it ends, this process becomes their parent.
        prctl(_PR_SET_CHILD_SUBREAPER, 1)
    leader = os.getpid()
    errors, report = os.pipe()
    # The command starts only after the leader has written to `go`. Before that, the leader records
    # itself, so that a runner can find and stop every command that has started.
    wait_here, go = os.pipe()
    # Block stop signals before the fork. At first, the command's process ignores stop signals,
    # because it inherits this from the leader. A signal that arrives before
    # `_prepare_command_process` has restored the default action would be lost. If the signal is
    # blocked, it waits until then (on Linux).
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    command_pid = os.fork()
    if command_pid == 0:
        os.close(errors)
        os.close(go)
        _prepare_command_process(leader)
        if not os.read(wait_here, 1):
            os._exit(1)
        os.close(wait_here)
        return lambda: _run_command(request, report, in_place)
    os.close(report)
    os.close(wait_here)
    _record_process(job_dir, request.attempt)
    os.write(go, b"1")
    os.close(go)
    code = _wait_for(command_pid)
    error = _read_start_error(errors)
    _kill_orphans()
    record = {"attempt": request.attempt, "exit_code": code, "error": error or None}
    write_atomically(job_dir / EXIT, json.dumps(record), durable=True)
    os._exit(0)


def _redirect_output(log: Path) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.close(nothing)
    os.close(output)


def _claim_attempt(job_dir: Path, attempt: int) -> None:
    """Take the job's lock for this attempt. This process ends without a message if it does not get
    the lock within `_LOCK_SECONDS`. It also ends if this attempt or a later attempt of the job was
    already started."""
    # Use a POSIX lock. The command does not inherit such a lock, so the system releases the lock
    # when this process ends, even if the command still runs. Never close this descriptor, and open
    # the file nowhere else in this process: the system also releases the lock when the process
    # closes any descriptor of the file.
    lock = os.open(job_dir / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    give_up = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            # An earlier attempt may still run: its runner started it late, or could not record its
            # start. Only one attempt may run, and the newest one is right.
            _kill_earlier(job_dir, attempt)
            if time.monotonic() > give_up:
                os._exit(0)
            time.sleep(0.005)
    earlier = read_record(job_dir / PROCESS, PROCESS_FIELDS)
    if earlier is not None and earlier["attempt"] >= attempt:
        os._exit(0)


def _kill_earlier(job_dir: Path, attempt: int) -> None:
    earlier = read_record(job_dir / PROCESS, PROCESS_FIELDS)
    if earlier is not None and earlier["attempt"] < attempt:
        leader = ProcessIdentity(pid=earlier["pid"], started=earlier["started"])
        signal_session(leader, signal.SIGKILL)


def _hold_computing_lock(path: Path) -> None:
    """Take the shared lock that tells completion servers that a job runs (`COMPUTING` in
    `jobs/folder.py`)."""
    # Never close this descriptor: the lock must be held until this process ends.
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    with contextlib.suppress(OSError):  # this file system does not support locks
        fcntl.flock(lock, fcntl.LOCK_SH)


def _record_process(job_dir: Path, attempt: int) -> None:
    """Record this process as the leader of the attempt. A runner needs this record to find the
    attempt's processes and to stop them."""
    me = identify(os.getpid())
    assert me is not None
    write_atomically(job_dir / PROCESS, json.dumps({"attempt": attempt, **asdict(me)}))


def _prepare_command_process(leader: int) -> None:
    """Prepare this process to run the command. Stop signals get their default action again. On
    Linux, also tell the kernel to kill this process if the leader is killed. Otherwise the command
    would run on without a leader, and nobody could record its exit code."""
    die_with_parent(leader)
    for number in _STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)


def _run_command(request: Request, report: int, in_place: bool) -> None:
    lower_priority(request.niceness)
    if in_place:
        os.close(report)
        _run_module(request)
        return
    try:
        os.execvpe(request.command[0], request.command, request.env)
    except (OSError, ValueError) as error:
        cause = error.strerror if isinstance(error, OSError) else error
        message = f"{request.command[0]} could not be started: {cause}."
        print(message, file=sys.stderr, flush=True)
        os.write(report, message.encode())
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def _run_module(request: Request) -> None:
    """Run `python -m module args` in this interpreter. This process was forked from the warm parent
    (`jobs/launchers/warm.py`), so the modules of the warm parent are already imported."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(request.env)
    sys.path[0] = request.job_dir
    # Open standard input again, because the buffer of the inherited sys.stdin may contain the
    # request of another job.
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    module, *arguments = request.command[2:]
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _wait_for(pid: int) -> int:
    """Wait until the process `pid` has ended. Returns its exit code, which is negative if a signal
    ended the process. Other child processes may end earlier; this function ignores them."""
    while True:
        ended, status = os.wait()
        if ended == pid:
            return os.waitstatus_to_exitcode(status)


def _kill_orphans() -> None:
    """Kill the processes that the command has left running. When one of these processes ends, its
    children become children of this process, so this function repeats until no child is left.
    Kills nothing on systems other than Linux."""
    while True:
        for child in _children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        try:
            os.wait()
        except ChildProcessError:
            return


def _children() -> list[int]:
    me = os.getpid()
    if not IS_LINUX:
        return []
    return [int(pid) for pid in Path(f"/proc/{me}/task/{me}/children").read_text().split()]


def _read_start_error(descriptor: int) -> str:
    """The reason why the command could not be started. Empty if the command was started.
    `descriptor` is the pipe into which `_run_command` writes this reason."""
    os.set_blocking(descriptor, False)
    try:
        return os.read(descriptor, 4096).decode(errors="replace")
    except BlockingIOError:
        return ""


def main() -> NoReturn:
    request = Request.from_json(sys.stdin.readline())
    supervise(request, in_place=False)()
    raise AssertionError("the command did not replace this process")


if __name__ == "__main__":
    main()
