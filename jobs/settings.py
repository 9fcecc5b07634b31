"""`JobsSettings`: how this machine runs jobs."""

import os
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class JobsSettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    database_url: str | None = None
    """`postgresql+psycopg://…`, or the path of a SQLite file. In pipeline.toml, a relative path
    starts at the folder of pipeline.toml. If unset, jobs are kept in a SQLite file in the state
    folder."""
    max_running: int = Field(default_factory=lambda: max(1, len(_usable_cores()) // 4), ge=1)
    """How many jobs may run at the same time. If unset, one for every four cores that the runner
    may use, but at least one. A pipeline never runs two jobs at once. So with only one pipeline, a
    number above 1 matters only for jobs that belong to no pipeline."""
    preload: tuple[str, ...] | None = None
    """Modules that one process imports in advance. On Linux, commands of the form `python -m …`,
    with the Python that runs hotpush, are forked from this process, so they do not import these
    modules again. With an empty list, every command imports its modules itself. If unset, the
    modules of the built-in retraining are imported in advance."""
    num_threads: int | None = Field(default=None, ge=1)
    """The number of threads of a job. If unset, a job gets one thread for each core that the runner
    may use. While a job runs, a server with the torch engine
    uses one thread fewer, and the kernel gives the server's threads priority over the job's
    threads."""
    niceness: int = Field(default=10, ge=0, le=19)
    """The nice value of a job's processes. The higher it is, the more of the processor time other
    programs get, such as a server."""
    timeout_seconds: float | None = Field(default=None, gt=0)
    """How long a job may run, all attempts together. After this time, the job is stopped, and has
    failed. The time in which the job had no runner, or waited for its next attempt, does not count.
    If unset, there is no limit."""
    retry_seconds: float = Field(default=30.0, gt=0)
    """If an attempt of a job failed for a temporary cause, such as a full disk or a hub that cannot
    be reached, the next attempt starts after this time. Each earlier attempt that failed or was
    killed makes this time four times longer. If the last attempt was killed, the next attempt
    starts at once."""
    lease_seconds: float = Field(default=15.0, gt=0)
    """If no heartbeat of a running job arrives during this time, a runner ends the job's attempt,
    and the job normally gets another one."""
    heartbeat_seconds: float = Field(default=3.0, gt=0)
    """The time between two heartbeats of a running job."""
    kill_grace_seconds: float = Field(default=10.0, ge=0)
    """Time between SIGTERM and SIGKILL when a job is stopped."""
    poll_seconds: float = Field(default=0.05, gt=0)
    """The pause between two checks of a runner. Each check looks for new jobs, and for processes
    that have ended."""
    keep_days: float = Field(default=30.0, gt=0)
    """How long the folder of an ended job is kept, with the job's log, metrics and records. If the
    job published a release, the folder is also kept for as long as this release exists."""
    metrics_port: int = Field(default=8071, ge=0, le=65535)
    """Port of the runner's Prometheus metrics, which only this machine can reach. 0 turns the
    metrics off."""

    @model_validator(mode="after")
    def _check_lease(self) -> Self:
        if self.lease_seconds < 2 * self.heartbeat_seconds:
            raise ValueError(
                f"lease_seconds ({self.lease_seconds:g}) must be at least twice heartbeat_seconds "
                f"({self.heartbeat_seconds:g}); otherwise a job's lease is lost if one heartbeat "
                "is late"
            )
        return self

    def threads(self) -> int:
        """The setting `num_threads` or, if it is unset, the number of cores that this process may
        use."""
        return self.num_threads or len(_usable_cores())


def _usable_cores() -> set[int]:
    try:
        return os.sched_getaffinity(0)
    except AttributeError:  # macOS has no `sched_getaffinity`
        return set(range(os.cpu_count() or 1))
