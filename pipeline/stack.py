"""Starts services of a stack (such as the hub and the job runner) as child processes, restarts a
child that ends or hangs, and stops all children at the end.

Each child runs its own `pipeline` command, so that a person can also start any service by hand.
"""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import filelock

from jobs.folder import write_atomically
from jobs.process import identify
from pipeline.errors import PipelineError
from pipeline.liveness import (
    PROBE_INTERVAL_SECONDS,
    ChildWatch,
    LivenessProbe,
    file_probe,
    http_probe,
)
from pipeline.log_files import rotate
from pipeline.orphans import STOP_SECONDS, end_orphans, end_with_parent
from pipeline.paths import Home, settings_file
from pipeline.services import Service, check_port
from pipeline.settings import HANG_SECONDS, settings_digest
from pipeline.settings_copy import VARIABLE as SETTINGS_COPY
from pipeline.settings_copy import write_copy
from pipeline.stack_record import Child, StackRecord, last_record

logger = logging.getLogger(__name__)

PROGRESS_SECONDS = 10.0
"""While `start` waits for a service, it calls `on_wait` each time this many seconds have passed."""
FILES_SECONDS = 5.0
"""The seconds between two checks of the stack's files. Each check limits the sizes of the logs, and
writes `stack.json` again if it is lost or damaged."""
RESTART_SECONDS = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""The seconds to wait before the first restart of a child, before its second restart, and so on.
The last number is used for all further restarts. The waits grow, because a child that ends again
and again would otherwise keep the machine busy."""
STEADY_SECONDS = 60.0
"""After a child has run for this long, its restarts are counted from zero again. So the next wait
is the shortest one."""


class Stack:
    """The child processes of the stack that uses one state folder. A lock prevents a second stack
    for the same folder."""

    def __init__(
        self, home: Home, services: Sequence[Service], *, hang_seconds: float = HANG_SECONDS
    ) -> None:
        self._home = home
        self._hang_seconds = hang_seconds
        self._probes: dict[str, LivenessProbe] = {}
        self._watches: dict[str, ChildWatch] = {}
        self._check_files_at = 0.0
        self._kill_reasons: dict[str, str] = {}
        """Child → why this stack has killed the child. The entry is removed when the process of the
        child has ended."""
        self._services = services
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._started_at: dict[str, float] = {}
        self._restarts: dict[str, int] = {}
        """Child → number of restarts since the child last ran for STEADY_SECONDS. The wait before
        the next restart depends on this number."""
        self._restart_at: dict[str, float] = {}
        self._children: dict[str, Child] = {}
        self._stack_started_at = time.time()
        self._settings_digest = settings_digest()
        self._has_started = False
        """Whether `start` has succeeded. `_is_ready` does not tell this: a stack for one job
        (`pipeline/by_hand.py`) starts, but is never marked as ready."""
        self._is_ready = False
        self._lock: filelock.BaseFileLock | None = None

    def start(
        self,
        on_ready: Callable[[Service], None] = lambda service: None,
        on_wait: Callable[[Service, float], None] = lambda service, seconds: None,
    ) -> None:
        """Start every service, and return when all services answer.

        This method waits for the services in their order, and calls `on_ready` for each service
        that has answered. While it waits for a service, it calls `on_wait` from time to time with
        the service and the seconds since the service was started.

        Raises PipelineError if another stack uses the state folder, if a port cannot be used, or if
        a child ends, answers that it must be restarted, or does not answer in time. Raises OSError
        if a file in the state folder cannot be written. Before this method raises an error, it
        stops the children that it has started.
        """
        self._home.root.mkdir(parents=True, exist_ok=True)
        self._lock = lock_stack(self._home)
        end_orphans(self._home)
        try:
            write_copy(settings_file(), self._home.settings_copy)
            for service in self._services:
                check_port(service)
            for service in self._services:
                self._spawn(service)
            for service in self._services:
                self._wait_until_ready(service, on_wait)
                on_ready(service)
        except BaseException:
            self.stop()
            raise
        self._has_started = True

    def mark_ready(self) -> None:
        """Write into `stack.json` that the stack can be used. `pipeline up --detach` waits for this
        mark."""
        self._is_ready = True
        self._write_record()

    def check_services(self) -> list[str]:
        """Kill each child that hangs, restart each child that has ended, keep the logs small, and
        write `stack.json` again if it is lost or damaged.

        Call this again and again while the stack is up. If a child answers that it must be
        restarted, this method kills it too. Returns one line of text for each child that this call
        has killed or started again, and for each child that has ended since the last call. If a
        child cannot be started, this method tries again later. It then returns a line only if the
        reason is not the same as at the last try.
        """
        events = []
        for service in self._services:
            if self._processes[service.name].poll() is None:
                events += self._check_child(service)
            elif service.name not in self._restart_at:
                events.append(self._plan_restart(service, self._describe_end(service.name)))
            elif time.monotonic() >= self._restart_at[service.name]:
                events += self._restart(service)
        if time.monotonic() >= self._check_files_at:
            self._check_files_at = time.monotonic() + FILES_SECONDS
            for name in ("up", *(service.name for service in self._services)):
                rotate(self._home.log_file(name))
            # Somebody may have damaged the record, or a full disk may have prevented a change of
            # the record. If this write fails too, the next check tries again.
            with contextlib.suppress(OSError):
                if last_record(self._home) != self._record():
                    self._write_record()
        return events

    def _check_child(self, service: Service) -> list[str]:
        name = service.name
        if name in self._kill_reasons:
            return []  # already killed, but not yet ended
        if time.monotonic() - self._started_at[name] > STEADY_SECONDS:
            self._restarts[name] = 0
        watch = self._watches.get(name)
        if watch is None:
            try:
                watch = self._watches[name] = ChildWatch(
                    self._probes[name],
                    start_seconds=service.start_seconds,
                    hang_seconds=self._hang_seconds,
                )
            except RuntimeError:  # no thread can be started now; the next call tries again
                return []
        if watch.has_stopped_answering != self._children[name].is_silent:
            self._change(name, is_silent=watch.has_stopped_answering)
        if (kill_reason := watch.kill_reason) is None:
            return []
        self._kill_reasons[name] = kill_reason
        # Send SIGKILL, because a process that is stopped (SIGSTOP) would not react to SIGTERM.
        self._processes[name].kill()
        return [f"killing {name}, because {kill_reason} (log: {self._home.log_file(name)})"]

    def _plan_restart(self, service: Service, end: str) -> str:
        name = service.name
        if (watch := self._watches.pop(name, None)) is not None:
            watch.stop()
        wait = RESTART_SECONDS[min(self._restarts.get(name, 0), len(RESTART_SECONDS) - 1)]
        self._restart_at[name] = time.monotonic() + wait
        self._change(name, process=None, started_at=None, is_silent=False, last_end=end)
        return f"{name} {end}; starting it again in {wait:g} s (log: {self._home.log_file(name)})"

    def _describe_end(self, name: str) -> str:
        if (kill_reason := self._kill_reasons.pop(name, None)) is not None:
            return f"was killed because {kill_reason}"
        return f"ended with {_describe_exit(self._processes[name].returncode)}"

    def _restart(self, service: Service) -> list[str]:
        name = service.name
        self._restarts[name] = self._restarts.get(name, 0) + 1
        try:
            self._spawn(service)
        except OSError as error:
            # The child could not be started, for example because too many files are open. Raise no
            # error, because the other services must stay up. The error may also come after the
            # process was started. So end this process: the record may not name it, and then nobody
            # could end it later.
            self._processes[name].kill()
            self._processes[name].wait()
            end = f"could not be started: {error}"
            is_repeated = end == self._children[name].last_end
            event = self._plan_restart(service, end)
            return [] if is_repeated else [event]
        del self._restart_at[name]
        return [f"{name} is up again"]

    def _change(self, name: str, **changes: object) -> None:
        self._children[name] = self._children[name].model_copy(update=changes)
        self._record_change()

    def stop(self) -> None:
        """Stop the children in the reverse order of `services`, then release the lock of the state
        folder.

        Does nothing if this object does not hold the lock: the services that run in this state
        folder may then belong to another stack.
        """
        if self._lock is None:
            return
        for watch in self._watches.values():
            watch.stop()
        for service in reversed(self._services):
            process = self._processes.get(service.name)
            if process is None or process.poll() is not None:
                continue
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._home.settings_copy.unlink(missing_ok=True)
        self._home.stack_file.unlink(missing_ok=True)
        self._lock.release()
        self._lock = None

    def _spawn(self, service: Service) -> None:
        self._probes[service.name] = (
            http_probe(service.url) if service.url else file_probe(self._home.runner_alive)
        )
        log = self._home.log_file(service.name)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as stream:
            self._processes[service.name] = subprocess.Popen(
                [sys.executable, "-m", "pipeline", *service.arguments],
                env={
                    **os.environ,
                    "PIPELINE_HOME": str(self._home.root),
                    "PIPELINE_SETTINGS": str(settings_file()),
                    SETTINGS_COPY: str(self._home.settings_copy),
                },
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                # Give each child its own session, so that Ctrl-C reaches only this process. This
                # process then stops the children in the right order.
                start_new_session=True,
                preexec_fn=end_with_parent(os.getpid()) if sys.platform == "linux" else None,
            )
        self._started_at[service.name] = time.monotonic()
        earlier = self._children.get(service.name)
        self._children[service.name] = Child(
            name=service.name,
            process=identify(self._processes[service.name].pid),
            url=service.url,
            pipeline=service.pipeline,
            metrics_port=service.metrics_port,
            started_at=time.time(),
            num_restarts=0 if earlier is None else earlier.num_restarts + 1,
            last_end=None if earlier is None else earlier.last_end,
        )
        self._record_change()

    def _wait_until_ready(
        self, service: Service, on_wait: Callable[[Service, float], None]
    ) -> None:
        process = self._processes[service.name]
        began = self._started_at[service.name]
        next_report_at = began + PROGRESS_SECONDS
        while (answer := self._probes[service.name](PROBE_INTERVAL_SECONDS)) != "works":
            if answer == "dead":
                raise PipelineError(
                    f"{service.name} answered while starting that it must be restarted; its log: "
                    f"{self._home.log_file(service.name)}"
                )
            if process.poll() is not None:
                raise PipelineError(
                    f"{service.name} ended with {_describe_exit(process.returncode)} while "
                    f"starting:\n{_tail(self._home.log_file(service.name))}"
                )
            waited = time.monotonic() - began
            if waited > service.start_seconds:
                where = "" if service.url is None else f" on {service.url}"
                raise PipelineError(
                    f"{service.name} did not answer{where} within {service.start_seconds:g} s; "
                    f"its log: {self._home.log_file(service.name)}"
                )
            if time.monotonic() >= next_report_at:
                next_report_at += PROGRESS_SECONDS
                on_wait(service, waited)
            time.sleep(0.02)

    def _record_change(self) -> None:
        """Write the record. If the write fails before `start` has returned, this method raises
        OSError. If the write fails later, this method only logs a warning, because the services can
        continue. A write fails, for example, when the disk is full."""
        try:
            self._write_record()
        except OSError as error:
            if not self._has_started:
                raise
            logger.warning("%s cannot be written: %s", self._home.stack_file, error.strerror)

    def _write_record(self) -> None:
        write_atomically(self._home.stack_file, self._record().model_dump_json(indent=2))

    def _record(self) -> StackRecord:
        me = identify(os.getpid())
        assert me is not None
        return StackRecord(
            process=me,
            started_at=self._stack_started_at,
            is_ready=self._is_ready,
            settings_digest=self._settings_digest,
            children=tuple(self._children.values()),
        )


def lock_stack(home: Home) -> filelock.BaseFileLock:
    """Take the lock of the state folder. Raises PipelineError if a stack has the lock."""
    lock = filelock.FileLock(home.stack_lock)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        raise PipelineError(
            f"a stack is already up in {home.root}; `pipeline status` shows it, and "
            "`pipeline down` stops it"
        ) from None
    return lock


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:  # most real-time signals have no name
        return f"signal {-code}"


def _tail(log: Path, num_lines: int = 15) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-num_lines:])
