"""Starts hub, receiver, runner and servers as child processes, keeps them up, and stops them.

Each child is a `pipeline` command of its own, so that any of them can as well be started by hand.
"""

import contextlib
import ctypes
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import filelock
import httpx
from pydantic import BaseModel, ConfigDict, ValidationError

from jobs.launchers.process import ProcessIdentity, identify, is_alive
from pipeline.errors import PipelineError
from pipeline.paths import Home
from pipeline.services import Service, check_port
from pipeline.settings import settings_digest, settings_file

logger = logging.getLogger(__name__)

START_SECONDS = 60.0
STOP_SECONDS = 15.0
RESTART_SECONDS = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Wait before each restart of a child that keeps dying; the last one repeats."""
STEADY_SECONDS = 60.0
"""A child that lived this long starts again from the shortest wait."""


class Child(BaseModel):
    """A service as `stack.json` records it."""

    model_config = ConfigDict(frozen=True)

    name: str
    process: ProcessIdentity | None
    """None while it is down, until it is started again."""
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
    """Whether every child has answered and the hub knows where to deliver."""
    settings_digest: str | None = None
    """Of the settings that the children were started with."""
    children: tuple[Child, ...] = ()


class Stack:
    """The children of one state folder. One stack per folder, held by a lock."""

    def __init__(self, home: Home, services: Sequence[Service]) -> None:
        self._home = home
        self._services = services
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._started_at: dict[str, float] = {}
        self._restarts: dict[str, int] = {}
        """Since it was last steady: what the next wait depends on."""
        self._restart_at: dict[str, float] = {}
        self._children: dict[str, Child] = {}
        self._since = time.time()
        self._settings_digest = settings_digest()
        self._is_ready = False
        self._lock = filelock.FileLock(home.stack_lock)

    def start(self, on_ready: Callable[[Service], None] = lambda service: None) -> None:
        """Start every service, and return once all of them answer.

        Raises PipelineError when another stack holds the folder, a port is busy, or a child ends.
        """
        self._home.root.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire(timeout=0)
        except filelock.Timeout:
            raise PipelineError(
                f"a stack is already up in {self._home.root}; see it with `pipeline status`, "
                "stop it with `pipeline down`"
            ) from None
        _end_leftovers(self._home)
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
        """Tell those who wait for this stack that it can be used."""
        self._is_ready = True
        self._write_record()

    def tend(self) -> list[str]:
        """Restart what died; returns a line for each child that ended or came back."""
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
        """Stop the children in reverse order, then give the folder back.

        Without effect on a stack that was refused the folder: what runs there is another's.
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
                # A session of its own: Ctrl-C reaches the parent only, which stops them in order.
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
        while service.url is not None and not _answers(service.url):
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
        """A stack that is up stays up on a full disk; one that starts there does not."""
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
            started_at=self._since,
            is_ready=self._is_ready,
            settings_digest=self._settings_digest,
            children=tuple(self._children.values()),
        )
        draft = self._home.stack_file.with_suffix(".draft")
        draft.write_text(record.model_dump_json(indent=2))
        os.replace(draft, self._home.stack_file)


def read_stack(home: Home) -> StackRecord | None:
    """What runs in this state folder; None when nothing does."""
    try:
        record = StackRecord.model_validate_json(home.stack_file.read_bytes())
    except (FileNotFoundError, ValidationError, json.JSONDecodeError):
        return None
    return record if is_alive(record.process) else None


def stale_settings(home: Home) -> str | None:
    """What to tell a person whose stack runs with other settings than the file has now."""
    record = read_stack(home)
    if record is None or settings_digest() in (None, record.settings_digest):
        return None
    return (
        f"{settings_file()} has changed since the stack was started, which goes on with what it "
        "said then; to restart it: pipeline down && pipeline up --detach"
    )


def _end_leftovers(home: Home) -> None:
    """End the children of a stack that was killed before it could stop them. Its lock is ours."""
    try:
        record = StackRecord.model_validate_json(home.stack_file.read_bytes())
    except (FileNotFoundError, ValidationError):
        return
    for child in reversed(record.children):
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
    """A killed parent leaves no child that holds a port."""

    def ask() -> None:
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # it was killed before the kernel knew
            os._exit(1)

    return ask


def _answers(url: str) -> bool:
    try:
        # A server without a release says 503: up, and waiting for its first one.
        httpx.get(f"{url}/health", timeout=5, trust_env=False)
    except httpx.TransportError:
        return False
    return True


def _describe_exit(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _tail(log: Path, num_lines: int = 15) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-num_lines:])
