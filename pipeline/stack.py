"""Starts the hub, the receiver, the runner and the servers as child processes, restarts a child
that ends, and stops them all.

Each child is a `pipeline` command of its own, so that a person can also start any of them by hand.
"""

import contextlib
import ctypes
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import filelock
from pydantic import BaseModel, ConfigDict, ValidationError

from jobs.folder import write_atomically
from jobs.launchers.process import ProcessIdentity, identify, is_alive
from pipeline.errors import PipelineError
from pipeline.paths import Home
from pipeline.probes import health
from pipeline.services import Service, check_port
from pipeline.settings import settings_digest, settings_file

logger = logging.getLogger(__name__)

START_SECONDS = 60.0
STOP_SECONDS = 15.0
RESTART_SECONDS = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""The wait before each restart of a child that keeps dying; the last value repeats."""
STEADY_SECONDS = 60.0
"""When a child has run this long, its next restart uses the shortest wait again."""


class Child(BaseModel):
    """A service as `stack.json` records it."""

    model_config = ConfigDict(frozen=True)

    name: str
    process: ProcessIdentity | None
    """None while the child is down and waits for its restart."""
    url: str | None = None
    started_at: float | None = None
    """Seconds since the epoch."""
    num_restarts: int = 0


class StackRecord(BaseModel):
    model_config = ConfigDict(frozen=True)

    process: ProcessIdentity
    started_at: float
    """Seconds since the epoch."""
    is_ready: bool
    """Whether every child has answered, and the hub has the webhook that posts to the receiver."""
    settings_digest: str | None = None
    """The digest of the settings file when the children were started."""
    children: tuple[Child, ...] = ()


class Stack:
    """The children of one state folder. A lock allows one stack per folder."""

    def __init__(self, home: Home, services: Sequence[Service]) -> None:
        self._home = home
        self._services = services
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._started_at: dict[str, float] = {}
        self._restarts: dict[str, int] = {}
        """Child → number of restarts since the child last ran for STEADY_SECONDS. The number
        determines the next wait."""
        self._restart_at: dict[str, float] = {}
        self._children: dict[str, Child] = {}
        self._stack_started_at = time.time()
        self._settings_digest = settings_digest()
        self._is_ready = False
        self._lock = filelock.FileLock(home.stack_lock)

    def start(self, on_ready: Callable[[Service], None] = lambda service: None) -> None:
        """Start every service, and return when all services answer.

        Raises PipelineError if another stack uses the state folder, a port is in use, or a child
        ends.
        """
        self._home.root.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire(timeout=0)
        except filelock.Timeout:
            raise PipelineError(
                f"a stack is already up in {self._home.root}; `pipeline status` shows it, and "
                "`pipeline down` stops it"
            ) from None
        _end_orphans(self._home)
        try:
            for service in self._services:
                check_port(service)
            for service in self._services:
                self._spawn(service)
            for service in self._services:
                self._wait_until_ready(service)
                on_ready(service)
        except BaseException:
            self.stop()
            raise

    def mark_ready(self) -> None:
        """Record that the stack can be used; `pipeline up --detach` waits for this."""
        self._is_ready = True
        self._write_record()

    def restart_ended(self) -> list[str]:
        """Restart each child that has ended. Returns a line for each child that has ended or is up
        again."""
        events = []
        now = time.monotonic()
        for service in self._services:
            process = self._processes[service.name]
            if process.poll() is None:
                if now - self._started_at[service.name] > STEADY_SECONDS:
                    self._restarts[service.name] = 0
            elif service.name not in self._restart_at:
                wait = RESTART_SECONDS[
                    min(self._restarts.get(service.name, 0), len(RESTART_SECONDS) - 1)
                ]
                self._restart_at[service.name] = now + wait
                self._children[service.name] = self._children[service.name].model_copy(
                    update={"process": None, "started_at": None}
                )
                self._record_change()
                events.append(
                    f"{service.name} ended with {_describe_exit(process.returncode)}; "
                    f"starting it again in {wait:g} s (log: {self._home.log_file(service.name)})"
                )
            elif now >= self._restart_at[service.name]:
                del self._restart_at[service.name]
                self._restarts[service.name] = self._restarts.get(service.name, 0) + 1
                self._spawn(service)
                events.append(f"{service.name} is up again")
        return events

    def stop(self) -> None:
        """Stop the children in reverse order, then release the lock of the state folder.

        Does nothing if this stack did not get the lock, because the running services then belong to
        another stack.
        """
        if not self._lock.is_locked:
            return
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
        self._home.stack_file.unlink(missing_ok=True)
        self._lock.release()

    def _spawn(self, service: Service) -> None:
        log = self._home.log_file(service.name)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as stream:
            self._processes[service.name] = subprocess.Popen(
                [sys.executable, "-m", "pipeline", *service.arguments],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                # In a session of its own, so that Ctrl-C reaches only the parent, which then stops
                # the children in order.
                start_new_session=True,
                preexec_fn=_end_with_parent(os.getpid()) if sys.platform == "linux" else None,
            )
        self._started_at[service.name] = time.monotonic()
        earlier = self._children.get(service.name)
        self._children[service.name] = Child(
            name=service.name,
            process=identify(self._processes[service.name].pid),
            url=service.url,
            started_at=time.time(),
            num_restarts=0 if earlier is None else earlier.num_restarts + 1,
        )
        self._record_change()

    def _wait_until_ready(self, service: Service) -> None:
        process = self._processes[service.name]
        deadline = time.monotonic() + START_SECONDS
        while service.url is not None and health(service.url) is None:
            if process.poll() is not None:
                raise PipelineError(
                    f"{service.name} ended with {_describe_exit(process.returncode)} while "
                    f"starting:\n{_tail(self._home.log_file(service.name))}"
                )
            if time.monotonic() > deadline:
                raise PipelineError(
                    f"{service.name} did not answer on {service.url} within {START_SECONDS:g} s; "
                    f"its log: {self._home.log_file(service.name)}"
                )
            time.sleep(0.02)

    def _record_change(self) -> None:
        """Write the record. If the disk is full, a stack that is starting ends, but a stack that is
        already up goes on."""
        try:
            self._write_record()
        except OSError as error:
            if not self._is_ready:
                raise
            logger.warning("%s cannot be written: %s", self._home.stack_file, error.strerror)

    def _write_record(self) -> None:
        me = identify(os.getpid())
        assert me is not None
        record = StackRecord(
            process=me,
            started_at=self._stack_started_at,
            is_ready=self._is_ready,
            settings_digest=self._settings_digest,
            children=tuple(self._children.values()),
        )
        write_atomically(self._home.stack_file, record.model_dump_json(indent=2))


def read_stack(home: Home) -> StackRecord | None:
    """The stack that runs in this state folder; None if no stack runs in it."""
    record = _read_record(home)
    return record if record is not None and is_alive(record.process) else None


def _read_record(home: Home) -> StackRecord | None:
    try:
        return StackRecord.model_validate_json(home.stack_file.read_bytes())
    except (FileNotFoundError, ValidationError):
        return None


def stale_settings(home: Home) -> str | None:
    """A warning if the settings file has changed since the stack was started; None if it has
    not."""
    record = read_stack(home)
    if record is None or settings_digest() in (None, record.settings_digest):
        return None
    return (
        f"{settings_file()} has changed since the stack was started, and the stack still uses the "
        "old settings; to restart it: pipeline down && pipeline up --detach"
    )


def _end_orphans(home: Home) -> None:
    """End the children of a stack that was killed. Call this only while holding the lock."""
    record = _read_record(home)
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


def _end_with_parent(parent: int) -> Callable[[], None]:
    """A function for the child process. It makes the kernel end the child when the parent dies, so
    that no child keeps a port."""

    def end_with_parent() -> None:
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # the parent died before the call above
            os._exit(1)

    return end_with_parent


def _describe_exit(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _tail(log: Path, num_lines: int = 15) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-num_lines:])
