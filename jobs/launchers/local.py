"""`LocalLauncher`: runs jobs as processes of this machine. The processes of each job form their own
session (setsid(2)).

The *warm parent* is a process that imports heavy modules in advance. A command of the form
`python -m …` is forked from the warm parent, if `python` is the runner's own interpreter
(`sys.executable`). If the warm parent is still importing modules, the command waits until these
imports are done. A new process would not be faster, because it would have to begin the same
imports. Any other command gets a *cold start*: it is started in a new process at once. If there is
no warm parent, every command gets a cold start.

A forked command has its own environment variables. But the modules of the warm parent were imported
before the fork. A module that reads variables during its import has read the variables of the warm
parent.
"""

import logging
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL, SIGTERM

from jobs.errors import LaunchError
from jobs.folder import EXIT, EXIT_FIELDS, LOG, OUTCOME, PROCESS, PROCESS_FIELDS, read_record
from jobs.launcher import Launch, Status
from jobs.launchers.process import ProcessIdentity, is_alive, signal_session
from jobs.launchers.supervise import Request
from jobs.launchers.warm_parent import WarmParent, environment_for_jobs_package

logger = logging.getLogger(__name__)

_START_SECONDS = 60.0
"""If a process has not recorded its start within this time, its attempt counts as lost. The time in
which the warm parent imports its modules does not count."""


@dataclass
class _PendingStart:
    """A start that was requested. It is pending until the new process has recorded in the job's
    folder that it runs."""

    request: Request
    since: float
    """The start must happen within `_START_SECONDS` after this time. Monotonic clock."""
    cold_process: subprocess.Popen[bytes] | None = None
    """The process of a cold start. None if the warm parent starts the command."""
    generation: int | None = None
    """The number of the warm parent that got the request (`WarmParent.generation`). None if no warm
    parent has got the request yet."""


class LocalLauncher:
    """`preload` names the modules that the warm parent imports. If `preload` is empty, or if the
    system is not Linux, there is no warm parent, so every start is a cold start."""

    def __init__(
        self, jobs_dir: Path, *, preload: Sequence[str] = (), environment: Mapping[str, str]
    ) -> None:
        self._jobs_dir = jobs_dir
        self._environment = environment
        self._starting: dict[str, _PendingStart] = {}
        self._cold_processes: list[subprocess.Popen[bytes]] = []
        self._warm: WarmParent | None = None
        if preload and sys.platform == "linux":
            self._warm = WarmParent(preload, environment, jobs_dir / "warm.log")

    def start(self, launch: Launch) -> str:
        handle = f"local:{launch.job_id}:{launch.attempt}"
        process = read_record(launch.job_dir / PROCESS, PROCESS_FIELDS)
        if handle in self._starting or (process and process["attempt"] >= launch.attempt):
            return handle
        # Remove the outcome of the previous attempt only now. It must not count for this attempt,
        # but until this attempt begins, a runner may still have to read it.
        (launch.job_dir / OUTCOME).unlink(missing_ok=True)
        request = Request(
            job_dir=str(launch.job_dir),
            attempt=launch.attempt,
            command=list(launch.command),
            env=dict(launch.env),
            niceness=launch.niceness,
        )
        starting = self._starting[handle] = _PendingStart(request=request, since=time.monotonic())
        try:
            if self._warm is not None and launch.command[:2] == (sys.executable, "-m"):
                self._send_to_warm_parent(self._warm, starting)
            else:
                self._start_cold(starting)
        except LaunchError:
            # The caller counts the attempt as failed. So `poll_processes` must not start it later.
            del self._starting[handle]
            raise
        return handle

    def poll(self, handle: str) -> Status:
        job_dir, attempt = self._job_dir_and_attempt(handle)
        status = _recorded_status(job_dir, attempt)
        if status is not None:
            self._starting.pop(handle, None)
            return status
        starting = self._starting.get(handle)
        if starting is not None:
            if self._may_still_start(starting):
                return Status(phase="starting")
            del self._starting[handle]
        # Read the record again, because the process may have written the record and ended after
        # the first read.
        return _recorded_status(job_dir, attempt) or Status(phase="vanished")

    def stop(self, handle: str, *, force: bool) -> None:
        starting = self._starting.get(handle)
        if starting is not None and starting.cold_process is None and starting.generation is None:
            # The request has not been sent to a warm parent, so there is no process to stop.
            del self._starting[handle]
        job_dir, attempt = self._job_dir_and_attempt(handle)
        leader = _leader(job_dir, attempt)
        if leader is not None:
            signal_session(leader, SIGKILL if force else SIGTERM)

    def logs(self, handle: str, offset: int) -> bytes:
        try:
            with (self._job_dir_and_attempt(handle)[0] / LOG).open("rb") as log:
                log.seek(offset)
                return log.read()
        except FileNotFoundError:
            return b""

    def poll_processes(self) -> None:
        self._cold_processes = [each for each in self._cold_processes if each.poll() is None]
        if self._warm is None:
            return
        self._warm.poll_processes()
        for handle, starting in list(self._starting.items()):
            if starting.cold_process is None and starting.generation != self._warm.generation:
                try:
                    self._send_to_warm_parent(self._warm, starting)
                except LaunchError as error:
                    # Only this attempt is lost: `poll` now says that its process has vanished.
                    logger.error("%s", error)
                    del self._starting[handle]

    def close(self) -> None:
        if self._warm is not None:
            self._warm.close()
        for process in self._cold_processes:
            # The process may run longer than the runner. Without an exit code, Popen would warn
            # that the process still runs. So set any exit code.
            process.returncode = 0

    def _send_to_warm_parent(self, warm: WarmParent, starting: _PendingStart) -> None:
        """Send the request to the warm parent. If the warm parent is still importing, send nothing;
        `poll_processes` calls this method again. If the warm parent is off, make a cold start.

        If a warm parent dies, the request is sent to the next warm parent too. So there may be two
        processes for one request. Only one of these processes gets the lock in the job's folder,
        and the other one ends.
        """
        match warm.state:
            case "importing":
                starting.since = time.monotonic()
            case "ready":
                warm.send(starting.request)
                starting.generation = warm.generation
            case "off":
                self._start_cold(starting)

    def _start_cold(self, starting: _PendingStart) -> None:
        try:
            starting.cold_process = subprocess.Popen(
                [sys.executable, "-m", "jobs.launchers.supervise"],
                env=environment_for_jobs_package(self._environment),
                stdin=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise LaunchError(
                f"No process could be started for {starting.request.command[0]}: {error}"
            ) from error
        assert starting.cold_process.stdin is not None
        self._cold_processes.append(starting.cold_process)
        try:
            with starting.cold_process.stdin as pipe:
                pipe.write(starting.request.to_json().encode() + b"\n")
        except BrokenPipeError:
            return  # the process has already ended, and `poll` will notice its end

    def _may_still_start(self, starting: _PendingStart) -> bool:
        if starting.cold_process is not None and starting.cold_process.poll() is not None:
            return False
        return time.monotonic() - starting.since < _START_SECONDS

    def _job_dir_and_attempt(self, handle: str) -> tuple[Path, int]:
        _, job_id, attempt = handle.split(":")
        return self._jobs_dir / job_id, int(attempt)


def _recorded_status(job_dir: Path, attempt: int) -> Status | None:
    """The status of the attempt, according to the files that its leader
    (`jobs/launchers/supervise.py`) has written. None if the leader has not recorded its start."""
    leader = _leader(job_dir, attempt)
    if leader is None:
        return None
    # Check whether the leader runs, and only then read the file `EXIT`. In the other order,
    # the leader could write the file and end between the two steps. The attempt would then count as
    # vanished.
    is_running = is_alive(leader)
    ended = read_record(job_dir / EXIT, EXIT_FIELDS)
    if ended is not None and ended["attempt"] == attempt:
        return Status(phase="exited", exit_code=ended["exit_code"], error=ended["error"])
    return Status(phase="running" if is_running else "vanished")


def _leader(job_dir: Path, attempt: int) -> ProcessIdentity | None:
    process = read_record(job_dir / PROCESS, PROCESS_FIELDS)
    if process is None or process["attempt"] != attempt:
        return None
    return ProcessIdentity(pid=process["pid"], started=process["started"])
