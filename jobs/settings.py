"""`JobsSettings`: how jobs are run on this machine."""

import os
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class JobsSettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    database_url: str | None = None
    """`postgresql+psycopg://…`; unset, jobs are kept in a SQLite file under the state folder."""
    max_running: int = Field(default=1, ge=1)
    """Jobs at a time, of different pipelines; each pipeline runs one at a time in any case."""
    preload: tuple[str, ...] | None = None
    """Modules that the warm parent imports, so that a Python job starts with them loaded; an empty
    list for no warm parent. Unset, those that the jobs of the stack need."""
    num_threads: int | None = Field(default=None, ge=1)
    """For jobs that do not say themselves. Unset, one core is left to the server."""
    timeout_seconds: float | None = Field(default=None, gt=0)
    """For jobs that do not say themselves. Unset, there is no limit."""
    lease_seconds: float = Field(default=15.0, gt=0)
    """A runner that was not heard of for this long is taken for dead, and its jobs are adopted."""
    heartbeat_seconds: float = Field(default=3.0, gt=0)
    kill_grace_seconds: float = Field(default=10.0, ge=0)
    """Between SIGTERM and SIGKILL when a job is stopped."""
    poll_seconds: float = Field(default=0.02, gt=0)
    """How soon a runner sees a new job or an ended process."""
    keep_days: float = Field(default=30.0, gt=0)
    """How long the folder of an ended job is kept: its log, metrics and records. That of a job
    whose release is still there stays in any case."""
    metrics_port: int = Field(default=8071, ge=0, le=65535)
    """Where the runner of a stack tells Prometheus, on this machine only; 0 for nowhere."""

    @model_validator(mode="after")
    def _a_lease_outlasts_heartbeats(self) -> Self:
        if self.lease_seconds < 2 * self.heartbeat_seconds:
            raise ValueError(
                f"lease_seconds ({self.lease_seconds:g}) must be at least twice heartbeat_seconds "
                f"({self.heartbeat_seconds:g}), or one late heartbeat loses every job"
            )
        return self

    def threads(self) -> int:
        """The default number of threads of a job."""
        if self.num_threads is not None:
            return self.num_threads
        return max(1, len(_usable_cores()) - 1)


def _usable_cores() -> set[int]:
    try:
        return os.sched_getaffinity(0)
    except AttributeError:  # not on macOS
        return set(range(os.cpu_count() or 1))
