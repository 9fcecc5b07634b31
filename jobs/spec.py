"""`JobSpec`: what to run. The submitter of a job writes the spec, and the runner reads it.

A spec holds no secret in plain text. A job gets its secrets from the runner's environment, or from
`sealed_env`, which is encrypted under the runner's key.
"""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Resources(_Record):
    num_threads: int | None = Field(default=None, ge=1)
    """Threads for numeric libraries (`OMP_NUM_THREADS`). None means the runner's default."""
    niceness: int = Field(default=10, ge=0, le=19)
    timeout_seconds: float | None = Field(default=None, gt=0)
    """How long the job may run, counted from the start of the first attempt. The time in which the
    job has no runner, or waits for its next attempt, does not count. When the time is over, the
    runner stops the job's processes and the job fails. None means the runner's default."""


class RevisionRange(_Record):
    """The commits of one ref that a job answers for: `old_sha..new_sha`.

    A range only records which pushes led to the job. It does not say what the job trains on: a job
    trains on what has changed since the revision of the served release.
    """

    repo: str
    """`owner/name`"""
    ref: str
    """The full name, as in `refs/heads/main`."""
    old_sha: str | None = None
    """None if the ref was new, or if the job was submitted by hand."""
    new_sha: str
    delivery_ids: tuple[str, ...] = ()
    """Every delivery that the job absorbed, oldest first."""

    def follows(self, other: "RevisionRange") -> bool:
        """Whether this range begins where `other` ends."""
        return self.old_sha is not None and self.old_sha == other.new_sha

    def absorb(self, arrived: "RevisionRange", *, may_be_older: bool = True) -> "RevisionRange":
        """One range that covers both ranges, with the delivery ids of this range.

        `arrived` came later, so its commits count as newer. There is one exception, because
        deliveries may overtake each other: if `arrived` ends where this range begins, its commits
        are older. With `may_be_older=False`, there is no exception.
        """
        first, last = self, arrived
        if may_be_older and self.follows(arrived) and not arrived.follows(self):
            first, last = arrived, self
        return self.model_copy(update={"old_sha": first.old_sha, "new_sha": last.new_sha})


class JobSpec(_Record):
    command: tuple[str, ...] = Field(min_length=1)
    """The program and its arguments; never a shell line."""
    pipeline: str | None = None
    """None for a plain command, which may run at the same time as any other job. A pipeline has at
    most one running job and at most two pending jobs: one of pushes, and one that was submitted by
    hand."""
    env: dict[str, str] = {}
    sealed_env: str | None = None
    """More environment variables, encrypted by `jobs.sealed`."""
    settings: dict[str, Any] = {}
    """The settings of the command. They are fixed when the job is submitted, and the command reads
    them in `spec.json`. The job store does not interpret them."""
    revisions: RevisionRange | None = None
    dedupe_key: str | None = None
    """If the pipeline's latest job has the same key, the submission returns that job instead of a
    new one, unless that job failed or was cancelled."""
    resources: Resources = Resources()
    launcher: str = "local"
    max_attempts: int = Field(default=3, ge=1)
    """How many attempts the job has in all, if each one vanishes without an outcome or fails for a
    temporary cause."""
    debounce_seconds: float = Field(default=0.0, ge=0)
    """A pending job starts once no newer commit has arrived for this long."""
    max_wait_seconds: float = Field(default=30.0, ge=0)
    """A pending job starts at the latest this long after its first commit, even if newer commits
    keep arriving."""
    labels: dict[str, str] = {}
