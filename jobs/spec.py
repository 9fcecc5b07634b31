"""`JobSpec`: what to run. Written by whoever submits a job, read by the runner.

A spec carries no secret in clear: tokens reach the job through the environment that the runner was
given, or encrypted under the runner's key.
"""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Resources(_Record):
    num_threads: int | None = Field(default=None, ge=1)
    """Threads for numeric libraries (`OMP_NUM_THREADS`); None leaves the launcher's default."""
    niceness: int = Field(default=10, ge=0, le=19)
    timeout_seconds: float | None = Field(default=None, gt=0)
    """From the first attempt's start; the process group is ended and the job fails."""


class RevisionRange(_Record):
    """The commits of one ref that a job answers for: `old_sha..new_sha`.

    This is provenance. What a job trains on starts at the served release's own revision.
    """

    repo: str
    """`owner/name`"""
    ref: str
    """In full, as in `refs/heads/main`."""
    old_sha: str | None = None
    """None when the ref was new, or when a job was started by hand."""
    new_sha: str
    delivery_ids: tuple[str, ...] = ()
    """Every delivery that the job absorbed, oldest first."""

    def follows(self, other: "RevisionRange") -> bool:
        """Whether this one begins where `other` ends."""
        return self.old_sha is not None and self.old_sha == other.new_sha

    def absorb(self, arrived: "RevisionRange") -> "RevisionRange":
        """The commits of both ranges as one, with this one's deliveries. `arrived` came later, and
        is newer unless the commits say otherwise: deliveries may overtake each other."""
        first, last = self, arrived
        if self.follows(arrived) and not arrived.follows(self):
            first, last = arrived, self
        return self.model_copy(update={"old_sha": first.old_sha, "new_sha": last.new_sha})


class JobSpec(_Record):
    command: tuple[str, ...] = Field(min_length=1)
    """The program and its arguments; never a shell line."""
    pipeline: str | None = None
    """At most one running and one pending job per pipeline; None for a command on its own."""
    env: dict[str, str] = {}
    sealed_env: str | None = None
    """More variables, encrypted by `jobs.sealed`; only the runner opens them."""
    settings: dict[str, Any] = {}
    """Frozen for the command to read in `spec.json`; the job store does not look inside."""
    revisions: RevisionRange | None = None
    dedupe_key: str | None = None
    """A second submission with the key of the pipeline's latest job, while that job has not
    failed, gets that job back."""
    resources: Resources = Resources()
    launcher: str = "local"
    max_attempts: int = Field(default=3, ge=1)
    """How often a job is started whose process vanished without an outcome."""
    debounce_seconds: float = Field(default=0.0, ge=0)
    """A pending job waits until no newer commit arrived for this long …"""
    max_wait_seconds: float = Field(default=30.0, ge=0)
    """… but never longer than this from its first commit."""
    labels: dict[str, str] = {}
