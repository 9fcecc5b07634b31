"""`LocalLauncher`: jobs as processes of this machine, each in a session of its own.

A `python -m` command is forked from the warm parent, where there is one. While that is still
importing, the command waits for it: it began earlier than a cold start would, so it is ready
sooner, at half the work. Everything else is started cold, at once. A forked command has its own
variables, but what a preloaded module read when it was imported came from the runner's.
"""

import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL, SIGTERM

from jobs.errors import LaunchError
from jobs.folder import EXIT, LOG, PROCESS, read_record
from jobs.launcher import Launch, Status
from jobs.launchers.process import ProcessIdentity, is_alive, signal_session
from jobs.launchers.supervise import Request
from jobs.launchers.warm_parent import WarmParent, environment_for_jobs_package

_START_SECONDS = 60.0
"""A process that has not said that it is there by then is lost."""


@dataclass
class _Starting:
    """A start that this launcher asked for, until its process says that it is there."""

    request: Request
    since: float
    cold: subprocess.Popen[bytes] | None = None
    generation: int | None = None
    """Of the warm parent that was sent the request; None while it waits for one."""


class LocalLauncher:
    """Without `preload`, and on systems where a fork is not safe, every start is a cold one."""

    def __init__(
        self, jobs_dir: Path, *, preload: Sequence[str] = (), environment: Mapping[str, str]
    ) -> None:
        self._jobs_dir = jobs_dir
        self._environment = environment
        self._starting: dict[str, _Starting] = {}
        self._cold: list[subprocess.Popen[bytes]] = []
        self._warm: WarmParent | None = None
        if preload and sys.platform == "linux":
            self._warm = WarmParent(preload, environment, jobs_dir / "warm.log")

    def start(self, launch: Launch) -> str:
        handle = f"local:{launch.job_id}:{launch.attempt}"
        process = read_record(launch.job_dir / PROCESS)
        if handle in self._starting or (process and process["attempt"] >= launch.attempt):
            return handle
        request = Request(
            job_dir=str(launch.job_dir),
            attempt=launch.attempt,
            command=list(launch.command),
            env=dict(launch.env),
            niceness=launch.niceness,
        )
        starting = self._starting[handle] = _Starting(request=request, since=time.monotonic())
        if self._warm is not None and launch.command[:2] == (sys.executable, "-m"):
            self._send(self._warm, starting)
        else:
            self._start_cold(starting)
        return handle

    def poll(self, handle: str) -> Status:
        job_dir, attempt = self._where(handle)
        status = _recorded(job_dir, attempt)
        if status is not None:
            self._starting.pop(handle, None)
            return status
        starting = self._starting.get(handle)
        if starting is not None:
            if self._is_coming(starting):
                return Status(phase="starting")
            del self._starting[handle]
        # It may have said so, and ended, since the first look.
        return _recorded(job_dir, attempt) or Status(phase="vanished")

    def stop(self, handle: str, *, force: bool) -> None:
        starting = self._starting.get(handle)
        if starting is not None and starting.cold is None and starting.generation is None:
            del self._starting[handle]  # waits for the warm parent: nothing to stop yet
        job_dir, attempt = self._where(handle)
        leader = _leader(job_dir, attempt)
        if leader is not None:
            signal_session(leader, SIGKILL if force else SIGTERM)

    def logs(self, handle: str, offset: int) -> bytes:
        try:
            with (self._where(handle)[0] / LOG).open("rb") as log:
                log.seek(offset)
                return log.read()
        except FileNotFoundError:
            return b""

    def tend(self) -> None:
        self._cold = [process for process in self._cold if process.poll() is None]
        if self._warm is None:
            return
        self._warm.tend()
        for starting in self._starting.values():
            if starting.cold is None and starting.generation != self._warm.generation:
                self._send(self._warm, starting)

    def close(self) -> None:
        if self._warm is not None:
            self._warm.close()
        for process in self._cold:
            process.returncode = 0  # it is not waited for: it outlives this one, on purpose

    def _send(self, warm: WarmParent, starting: _Starting) -> None:
        """May be sent twice, where a warm parent dies; the lock in the job folder tells."""
        match warm.state:
            case "importing":
                starting.since = time.monotonic()
            case "ready":
                warm.send(starting.request)
                starting.generation = warm.generation
            case "off":
                self._start_cold(starting)

    def _start_cold(self, starting: _Starting) -> None:
        try:
            starting.cold = subprocess.Popen(
                [sys.executable, "-m", "jobs.launchers.supervise"],
                env=environment_for_jobs_package(self._environment),
                stdin=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise LaunchError(
                f"No process could be started for {starting.request.command[0]}: {error}"
            ) from error
        assert starting.cold.stdin is not None
        self._cold.append(starting.cold)
        try:
            with starting.cold.stdin as pipe:
                pipe.write(starting.request.to_json().encode() + b"\n")
        except BrokenPipeError:
            return  # `poll` will see that it is dead

    def _is_coming(self, starting: _Starting) -> bool:
        if starting.cold is not None and starting.cold.poll() is not None:
            return False
        return time.monotonic() - starting.since < _START_SECONDS

    def _where(self, handle: str) -> tuple[Path, int]:
        _, job_id, attempt = handle.split(":")
        return self._jobs_dir / job_id, int(attempt)


def _recorded(job_dir: Path, attempt: int) -> Status | None:
    """What the attempt's own process wrote; None where it has written nothing yet."""
    leader = _leader(job_dir, attempt)
    if leader is None:
        return None
    is_running = is_alive(leader)  # asked first: it writes how it ended, then it ends
    ended = read_record(job_dir / EXIT)
    if ended is not None and ended["attempt"] == attempt:
        return Status(phase="exited", exit_code=ended["exit_code"], error=ended["error"])
    return Status(phase="running" if is_running else "vanished")


def _leader(job_dir: Path, attempt: int) -> ProcessIdentity | None:
    process = read_record(job_dir / PROCESS)
    if process is None or process["attempt"] != attempt:
        return None
    return ProcessIdentity(pid=process["pid"], started=process["started"])
