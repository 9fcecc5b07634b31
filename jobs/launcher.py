"""`Launcher`: the seam between the runner and whatever starts processes. It knows no store."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One attempt of a job: what to start, and where."""

    job_id: str
    attempt: int
    command: tuple[str, ...]
    env: Mapping[str, str]
    """All of the process's variables; nothing is inherited beside them."""
    job_dir: Path
    """Exists; the command's working folder, which takes its log."""
    niceness: int


@dataclass(frozen=True, kw_only=True)
class Status:
    phase: Literal["starting", "running", "exited", "vanished"]
    """`vanished`: it is not there, and nobody knows how it ended."""
    exit_code: int | None = None
    """Of an exited command; negative for a signal."""
    error: str | None = None
    """Why an exited command was never started."""


class Launcher(Protocol):
    """Handles are derived from job id and attempt: a start after a crash finds the old process."""

    def start(self, launch: Launch) -> str:
        """The attempt's handle; starts it unless it was started before. Does not wait for it.

        Raises LaunchError where it cannot even be tried.
        """

    def poll(self, handle: str) -> Status:
        """Where the attempt stands, also one that an earlier runner started. Never waits."""

    def stop(self, handle: str, *, force: bool) -> None:
        """Ask every process of the attempt to end, or (`force`) end them. Never waits: poll."""

    def logs(self, handle: str, offset: int) -> bytes:
        """What the command wrote since the byte `offset` of its log."""

    def tend(self) -> None:
        """Called many times a second, so that a launcher needs no thread of its own."""

    def close(self) -> None:
        """Let go of what the launcher holds for itself. Started commands go on."""
