"""The process that leads a job's session: it starts the command, waits, and writes how it ended.

It is a process of its own so that the exit code survives the runner and the warm parent, and so
that everything which the command started ends with it. Run as a program, it reads one request
from standard input. Standard library only, so that it starts in a moment.
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

from jobs.folder import COMPUTING, EXIT, LOCK, LOG, PROCESS, read_record, write_whole
from jobs.launchers.process import IS_LINUX, be_nice, end_with, identify, prctl

_PR_SET_CHILD_SUBREAPER = 36
_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_LOCK_SECONDS = 10.0
"""How long an attempt waits for the process of the one before it to be gone."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a launcher asks for; one line of JSON, over a pipe and never on disk: it has secrets."""

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
    """Begin a session for the request. Returns in the command's own process only.

    What it returns becomes the command when it is called: with `in_place` a `python -m` command
    runs in this very interpreter, with all that it has imported; any other replaces it. Call this
    in a process that has forked for the purpose: it leads the session, and never comes back.
    """
    with contextlib.suppress(PermissionError):  # leads a session already
        os.setsid()
    for number in _STOPS:
        signal.signal(number, signal.SIG_IGN)  # a stop is for the command; this writes how it ended
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    job_dir = Path(request.job_dir)
    _redirect(job_dir / LOG)
    os.chdir(job_dir)
    _take_attempt(job_dir, request.attempt)
    _say_that_it_computes(job_dir.parent / COMPUTING)
    if prctl is not None:
        prctl(_PR_SET_CHILD_SUBREAPER, 1)  # orphans of the command come to this process
    leader = os.getpid()
    errors, report = os.pipe()
    wait_here, go = os.pipe()
    # A stop that comes while the command's process is being made waits until it can take it.
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
    command_pid = os.fork()
    if command_pid == 0:
        os.close(errors)
        os.close(go)
        _leave_with(leader)
        if not os.read(wait_here, 1):
            os._exit(1)
        os.close(wait_here)
        return lambda: _become(request, report, in_place)
    os.close(report)
    os.close(wait_here)
    _announce(job_dir, request.attempt)
    os.write(go, b"1")
    os.close(go)
    code = _wait_for(command_pid)
    error = _read_all(errors)
    _end_the_rest()
    record = {"attempt": request.attempt, "exit_code": code, "error": error or None}
    write_whole(job_dir / EXIT, json.dumps(record), durable=True)
    os._exit(0)


def _redirect(log: Path) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.close(nothing)
    os.close(output)


def _take_attempt(job_dir: Path, attempt: int) -> None:
    """Become the one process of this attempt, or end without a trace."""
    # A POSIX lock: the command inherits none of it, so it is free as soon as this process is gone.
    # Never closed, and the file is opened nowhere else: closing any descriptor of it would free it.
    lock = os.open(job_dir / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    give_up = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            # The attempt before may have recorded its end, and not be gone yet.
            if time.monotonic() > give_up:
                os._exit(0)
            time.sleep(0.005)
    earlier = read_record(job_dir / PROCESS)
    if earlier is not None and earlier["attempt"] >= attempt:
        os._exit(0)


def _say_that_it_computes(path: Path) -> None:
    # Never closed: it is free once this process is gone, and a command that runs in place.
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    with contextlib.suppress(OSError):  # there are no locks on that file system
        fcntl.flock(lock, fcntl.LOCK_SH)


def _announce(job_dir: Path, attempt: int) -> None:
    """Say that the attempt runs: from here on it can be found, stopped and adopted."""
    me = identify(os.getpid())
    assert me is not None
    write_whole(job_dir / PROCESS, json.dumps({"attempt": attempt, **asdict(me)}))


def _leave_with(leader: int) -> None:
    """Let the kernel end this process when the one that would record its end is killed."""
    end_with(leader)
    for number in _STOPS:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)


def _become(request: Request, report: int, in_place: bool) -> None:
    be_nice(request.niceness)
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
    """What `python -m module args` does, in an interpreter that has imported much already."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(request.env)
    sys.path[0] = request.job_dir
    # The old one may have read ahead, into another job's request.
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    module, *arguments = request.command[2:]
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _wait_for(pid: int) -> int:
    """The exit code of `pid`, negative for a signal; orphans that came here are reaped too."""
    while True:
        ended, status = os.wait()
        if ended == pid:
            return os.waitstatus_to_exitcode(status)


def _end_the_rest() -> None:
    """End what the command left running. An orphan's own children come here when it ends."""
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


def _read_all(descriptor: int) -> str:
    """What was reported before the command took over: the pipe is closed by its exec."""
    os.set_blocking(descriptor, False)
    try:
        return os.read(descriptor, 4096).decode(errors="replace")
    except BlockingIOError:
        return ""


def main() -> NoReturn:
    request = Request.from_json(sys.stdin.readline())
    supervise(request, in_place=False)()
    raise AssertionError("the command did not take over")


if __name__ == "__main__":
    main()
