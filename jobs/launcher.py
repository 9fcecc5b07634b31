"""`Launcher`: the interface through which the runner starts the commands of jobs. A launcher does
not use the job store."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What to start for one attempt of a job."""

    job_id: str
    attempt: int
    command: tuple[str, ...]
    env: Mapping[str, str]
    """All environment variables of the process. The process inherits no other variables."""
    job_dir: Path
    """The working folder of the command. The launcher writes the command's log into this folder,
    which must exist."""
    niceness: int


@dataclass(frozen=True, kw_only=True)
class Status:
    phase: Literal["starting", "running", "exited", "vanished"]
    """`vanished`: the process is gone and left no exit code."""
    exit_code: int | None = None
    """The exit code of the command, negative if a signal ended the command. None in every phase
    except `exited`."""
    error: str | None = None
    """Why the command could not be started. The phase is then `exited`. None if the command was
    started."""


class Launcher(Protocol):
    """Starts and watches attempts. A *handle* is the launcher's name for an attempt.

    The handle depends only on the job's id and the attempt's number. So if a runner crashes, and
    the next runner starts the same attempt again, the launcher finds the process that already runs.

    `start`, `poll` and `stop` raise DamagedRecord if the job's command has damaged a file that the
    launcher needs.
    """

    def start(self, launch: Launch) -> str:
        """Remove the outcome that an earlier attempt has left in the job's folder, and start the
        attempt. If the attempt was already started, do neither. Returns the attempt's handle
        without waiting.

        Raises LaunchError if no process can be started, and OSError if the outcome cannot be
        removed.
        """

    def poll(self, handle: str) -> Status:
        """The attempt's status. This also works if an earlier runner started the attempt. Never
        waits."""

    def stop(self, handle: str, *, force: bool) -> None:
        """Ask every process of the attempt to end. With `force`, kill these processes instead.
        Never waits; call `poll` to learn whether the attempt has ended."""

    def logs(self, handle: str, offset: int) -> bytes:
        """The content of the command's log from byte `offset` on."""

    def poll_processes(self) -> None:
        """Do the launcher's periodic work. The runner calls this method many times a second, so
        that a launcher needs no thread."""

    def close(self) -> None:
        """End the launcher's own helper processes. Commands that were started continue to run."""
