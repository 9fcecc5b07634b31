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
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

import filelock

from jobs.folder import write_by_rename
from jobs.process import ProcessIdentity, die_with_parent, identify, is_alive
from pipeline.errors import PipelineError
from pipeline.logs import rotate
from pipeline.paths import Home, settings_file
from pipeline.settings import HANG_SECONDS, SETTINGS_COPY, write_settings_copy
from pipeline.stack.record import Child, StackRecord, last_record
from pipeline.stack.services import (
    PROBE_INTERVAL_SECONDS,
    ChildWatch,
    LivenessProbe,
    Service,
    check_port,
    file_probe,
    http_probe,
)

logger = logging.getLogger(__name__)

PROGRESS_SECONDS = 10.0
"""While `start` waits for a service, it says so each time this many seconds have passed."""
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
STOP_SECONDS = 15.0
"""A service that does not end within this many seconds after SIGTERM gets SIGKILL."""


class _Running:
    """A child of the stack: a service and its present process."""

    def __init__(self, service: Service, process: subprocess.Popen[bytes]) -> None:
        self.service = service
        self.process = process
        self.record = Child(
            name=service.name, process=None, url=service.url, pipeline=service.pipeline
        )
        self.started_at = 0.0
        self.probe: LivenessProbe = lambda seconds: "unknown"
        self.watch: ChildWatch | None = None
        self.kill_reason: str | None = None
        """Why the stack has killed the process. None again when the process has ended."""
        self.restarts = 0
        """The number of restarts since the child last ran for STEADY_SECONDS. The wait before the
        next restart depends on this number."""
        self.restart_at: float | None = None
        """When the child is started again; None while its process runs."""

    def describe_end(self) -> str:
        reason, self.kill_reason = self.kill_reason, None
        if reason is not None:
            return f"was killed because {reason}"
        return f"ended with {_describe_exit(self.process.returncode)}"


class Stack:
    """The child processes of the stack that uses one state folder. A lock prevents a second stack
    for the same folder."""

    def __init__(
        self,
        home: Home,
        services: Sequence[Service],
        *,
        only: str | None = None,
        hang_seconds: float = HANG_SECONDS,
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._home = home
        self._services = services
        self._only = only
        self._variables = variables
        self._hang_seconds = hang_seconds
        self._running: dict[str, _Running] = {}
        self._check_files_at = 0.0
        self._stack_started_at = time.time()
        self._is_ready = False
        self._lock: filelock.BaseFileLock | None = None

    def start(self, say: Callable[[str], None] = lambda line: None) -> None:
        """Start every service, and return when all services answer.

        This method waits for the services in their order, and calls `say` with a line of text for
        each service that has answered, and from time to time while it waits for one.

        Raises PipelineError if another stack uses the state folder, if a port cannot be used, or if
        a child ends, answers that it must be restarted, or does not answer in time. Raises OSError
        if a file in the state folder cannot be written. Before this method raises an error, it
        stops the children that it has started.
        """
        self._home.root.mkdir(parents=True, exist_ok=True)
        self._lock = lock_stack(self._home)
        _end_orphans(self._home)
        try:
            write_settings_copy(self._home)
            for service in self._services:
                check_port(service)
            for service in self._services:
                self._spawn(service)
            for child in self._running.values():
                self._wait_until_ready(child, say)
                say(f"{child.service.name:10} {child.service.url or 'ready'}")
        except BaseException:
            self.stop()
            raise

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
        for child in self._running.values():
            if child.process.poll() is None:
                events += self._check_child(child)
            elif child.restart_at is None:
                events.append(self._plan_restart(child, child.describe_end()))
            elif time.monotonic() >= child.restart_at:
                events += self._restart(child)
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

    def _check_child(self, child: _Running) -> list[str]:
        if child.kill_reason is not None:
            return []  # already killed, but not yet ended
        if time.monotonic() - child.started_at > STEADY_SECONDS:
            child.restarts = 0
        if child.watch is None:
            try:
                child.watch = ChildWatch(
                    child.probe,
                    start_seconds=child.service.start_seconds,
                    hang_seconds=self._hang_seconds,
                )
            except RuntimeError:  # no thread can be started now; the next call tries again
                return []
        if child.watch.has_stopped_answering != child.record.is_silent:
            self._change(child, is_silent=child.watch.has_stopped_answering)
        if child.watch.kill_reason is None:
            return []
        child.kill_reason = child.watch.kill_reason
        # Send SIGKILL, because a process that is stopped (SIGSTOP) would not react to SIGTERM.
        child.process.kill()
        return [f"killing {child.service.name}, because {child.kill_reason} {self._log(child)}"]

    def _plan_restart(self, child: _Running, end: str) -> str:
        if child.watch is not None:
            child.watch.stop()
            child.watch = None
        wait = RESTART_SECONDS[min(child.restarts, len(RESTART_SECONDS) - 1)]
        child.restart_at = time.monotonic() + wait
        self._change(child, process=None, started_at=None, is_silent=False, last_end=end)
        return f"{child.service.name} {end}; starting it again in {wait:g} s {self._log(child)}"

    def _log(self, child: _Running) -> str:
        return f"(log: {self._home.log_file(child.service.name)})"

    def _restart(self, child: _Running) -> list[str]:
        child.restarts += 1
        try:
            self._spawn(child.service)
        except OSError as error:
            # The child could not be started, for example because too many files are open. Raise no
            # error, because the other services must stay up. The error may also come after the
            # process was started. So end this process: the record may not name it, and then nobody
            # could end it later.
            child.process.kill()
            child.process.wait()
            end = f"could not be started: {error}"
            is_repeated = end == child.record.last_end
            event = self._plan_restart(child, end)
            return [] if is_repeated else [event]
        child.restart_at = None
        return [f"{child.service.name} is up again"]

    def _change(self, child: _Running, **changes: object) -> None:
        child.record = child.record.model_copy(update=changes)
        self._record_change()

    def stop(self) -> None:
        """Stop the children in the reverse order of `services`, then release the lock of the state
        folder.

        Does nothing if this object does not hold the lock: the services that run in this state
        folder may then belong to another stack.
        """
        if self._lock is None:
            return
        for child in reversed(self._running.values()):
            if child.watch is not None:
                child.watch.stop()
            child.process.terminate()
            try:
                child.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()
        self._home.settings_copy.unlink(missing_ok=True)
        self._home.stack_file.unlink(missing_ok=True)
        self._lock.release()
        self._lock = None

    def _spawn(self, service: Service) -> None:
        probe = http_probe(service.url) if service.url else file_probe(self._home.runner_alive)
        log = self._home.log_file(service.name)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as stream:
            process = subprocess.Popen(
                [sys.executable, "-m", "pipeline", *service.arguments],
                env={
                    **os.environ,
                    **self._variables,
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
                # Without this, the child would run on after the end of this process, and its port
                # would stay in use.
                preexec_fn=partial(die_with_parent, os.getpid(), signal.SIGTERM),
            )
        is_restart = service.name in self._running
        child = self._running.setdefault(service.name, _Running(service, process))
        child.process, child.probe, child.started_at = process, probe, time.monotonic()
        self._change(
            child,
            process=identify(process.pid),
            started_at=time.time(),
            num_restarts=child.record.num_restarts + is_restart,
        )

    def _wait_until_ready(self, child: _Running, say: Callable[[str], None]) -> None:
        service, log = child.service, self._home.log_file(child.service.name)
        next_report_at = child.started_at + PROGRESS_SECONDS
        while (answer := child.probe(PROBE_INTERVAL_SECONDS)) != "works":
            waited = time.monotonic() - child.started_at
            if answer == "dead":
                fault = "answered while starting that it must be restarted"
                raise PipelineError(f"{service.name} {fault}; its log: {log}")
            if child.process.poll() is not None:
                tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
                raise PipelineError(
                    f"{service.name} {child.describe_end()} while starting:\n{tail}"
                )
            if waited > service.start_seconds:
                where = "" if service.url is None else f" on {service.url}"
                fault = f"did not answer{where} within {service.start_seconds:g} s"
                raise PipelineError(f"{service.name} {fault}; its log: {log}")
            if time.monotonic() >= next_report_at:
                next_report_at += PROGRESS_SECONDS
                limit = f"{waited:.0f} s of at most {service.start_seconds:.0f} s"
                say(f"{service.name:10} is starting: {limit} (log: {log})")
            time.sleep(0.02)

    def _record_change(self) -> None:
        """Write the record. If the write fails, for example because the disk is full, this method
        only logs a warning, because the services can continue."""
        try:
            self._write_record()
        except OSError as error:
            logger.warning("%s cannot be written: %s", self._home.stack_file, error.strerror)

    def _write_record(self) -> None:
        write_by_rename(self._home.stack_file, self._record().model_dump_json(indent=2))

    def _record(self) -> StackRecord:
        me = identify(os.getpid())
        assert me is not None
        return StackRecord(
            process=me,
            started_at=self._stack_started_at,
            only=self._only,
            is_ready=self._is_ready,
            children=tuple(child.record for child in self._running.values()),
        )


def lock_stack(home: Home) -> filelock.BaseFileLock:
    """Take the lock of the state folder. Raises PipelineError if a stack has the lock."""
    lock = filelock.FileLock(home.stack_lock)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        raise PipelineError(
            f"a stack is already up in {home.root}; to stop it: pipeline down"
        ) from None
    return lock


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:  # most real-time signals have no name
        return f"signal {-code}"


def _end_orphans(home: Home) -> None:
    """End the children that a killed stack has left running, and remove the record of this stack.

    The caller must hold the lock of the state folder. Without the lock, another stack may be
    running, and this function would end the children of that stack.
    """
    record = last_record(home)
    for child in reversed(record.children if record else ()):
        if child.process is not None:
            _end(child.process)
    home.stack_file.unlink(missing_ok=True)


def _end(process: ProcessIdentity) -> None:
    deadline = time.monotonic() + STOP_SECONDS
    while is_alive(process):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGTERM if time.monotonic() < deadline else signal.SIGKILL)
        time.sleep(0.05)
