"""`JobSpec`: what to run. The submitter of a job writes the spec, and the runner reads it.

Put no secret into `env` or `settings`, because everybody who can list jobs sees these fields. A job
gets its secrets from the runner's environment, or from `sealed_env`, which is encrypted with the
runner's key.
"""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Resources(_Record):
    num_threads: int | None = Field(default=None, ge=1)
    """Threads for numeric libraries (`OMP_NUM_THREADS`). None means the runner's default, see
    `JobsSettings.threads`."""
    niceness: int = Field(default=10, ge=0, le=19)
    """The nice value of the job's processes. With a higher value, other programs get more of the
    processor time."""
    timeout_seconds: float | None = Field(default=None, gt=0)
    """How long the job may run, all attempts together. The time in which the job has no runner, or
    waits for its next attempt, does not count. When the time is over, the runner stops the job's
    processes, and the job fails. None means the runner's default,
    `JobsSettings.timeout_seconds`."""


class RevisionRange(_Record):
    """The commits of one ref that led to a job: the commits after `old_sha`, up to and including
    `new_sha`. The job *answers for* these commits: its outcome is also their outcome.

    `old_sha` records where the range begins. `absorb`, which joins two ranges, needs it to find
    which of them is newer. A retraining does not start from `old_sha`: it compares the rows at
    `new_sha` with the rows that the parent release was trained on. The parent release is the
    release from which the job continues, normally the served release.
    """

    repo: str
    """`owner/name` on a hub, or the git URL of a repository elsewhere."""
    ref: str
    """The full name of the ref, such as `refs/heads/main`."""
    old_sha: str | None = None
    """The commit before the range. None if the ref was new, or if the job was submitted by hand."""
    new_sha: str
    """The last commit of the range."""
    delivery_ids: tuple[str, ...] = ()
    """The ids of all deliveries that the job answers for, oldest first."""

    def follows(self, other: "RevisionRange") -> bool:
        """Whether this range begins where `other` ends."""
        return self.old_sha is not None and self.old_sha == other.new_sha

    def absorb(self, arrived: "RevisionRange", *, may_be_older: bool = True) -> "RevisionRange":
        """One range that covers this range and `arrived`. The result has only the delivery ids of
        this range; `jobs/submissions.py` records the delivery ids of `arrived` in the store.

        `arrived` came later, so its commits normally count as newer. But deliveries may overtake
        each other. So if `arrived` ends where this range begins, the commits of `arrived` count as
        older. This rule has two exceptions:

        - With `may_be_older=False`, the commits of `arrived` always count as newer.
        - If this range is `A..B` and `arrived` is `B..A`, somebody has pushed the ref back to the
          earlier commit A. The commits of `arrived` then count as newer.
        """
        first, last = self, arrived
        if may_be_older and self.follows(arrived) and not arrived.follows(self):
            first, last = arrived, self
        return self.model_copy(update={"old_sha": first.old_sha, "new_sha": last.new_sha})


class JobSpec(_Record):
    command: tuple[str, ...] = Field(min_length=1)
    """The program and its arguments; never a shell line."""
    pipeline: str | None = None
    """The pipeline that the job belongs to. None for a plain command. A pipeline has at most one
    running job, and at most two pending jobs: one created by pushes, and one submitted by hand. The
    number of plain commands is not limited."""
    env: dict[str, str] = {}
    """Environment variables for the command. If the runner passes on a variable of the same name,
    the value in `env` replaces the runner's value."""
    sealed_env: str | None = None
    """More environment variables, encrypted by `jobs.sealed`. None if the job has no secrets."""
    settings: dict[str, Any] = {}
    """Settings for the command, which reads them from `spec.json`. The job store does not interpret
    them."""
    revisions: RevisionRange | None = None
    """The commits that led to the job. None if no commit led to it."""
    dedupe_key: str | None = None
    """A text that marks equal submissions. If an earlier job has the same key as a submission, the
    submission returns the earlier job, and no new job is created. This rule does not apply if the
    earlier job failed or was cancelled. A submission of a pipeline is compared with only one
    earlier job: the pending job that was created by pushes or, if there is none, the newest job of
    the pipeline. A submission by hand, or one without a key, is compared with no job."""
    resources: Resources = Resources()
    launcher: str = "local"
    """The launcher that starts the command. There is only `local` (`jobs/launchers/local.py`)."""
    max_attempts: int = Field(default=3, ge=1)
    """The job fails when this many of its attempts were lost (for example, because the process was
    killed) or failed for a temporary cause. If an attempt fails for another cause, the job fails at
    once. A plain command also fails at once if its process was killed. An attempt that ended
    because its runner was stopped does not count."""
    debounce_seconds: float = Field(default=0.0, ge=0)
    """A pending job may start once no newer commit has arrived for this long."""
    max_wait_seconds: float = Field(default=30.0, ge=0)
    """A pending job may start once this long has passed since its first commit arrived, even if
    newer commits keep arriving."""
    labels: dict[str, str] = {}
    """Names and values, mostly for people. The job store does not interpret them. But the runner
    interprets the label `webhook`: it marks a copy of a job, and names the webhook that started the
    copy. Such a copy does not get the secret of the stack's webhook in `WEBHOOK_SECRET`."""
