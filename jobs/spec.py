"""`JobSpec`: what to run. The submitter of a job writes the spec, and the runner reads it.

Put no secret into `env` or `settings`, because everybody who can list jobs sees these fields. A job
gets its secrets from the runner's environment, or from `sealed_env`, which is encrypted with the
runner's key.
"""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

LOCAL = "local"
"""The launcher of jobs that run on the runner's own machine."""
DEFAULT_BRANCH = "refs/heads/main"
JOB_URL, JOB_TICKET = "JOB_URL", "JOB_TICKET"
"""The variables that an agent elsewhere gets: the URL of its attempt on a hub, and the ticket for
the start of it."""
_SHIFTS = {"K": 10, "M": 20, "G": 30, "T": 40}


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


def is_git_url(repo: str) -> bool:
    """Whether `repo` is the URL of a git repository. Otherwise it is `owner/name` on a hub."""
    return "://" in repo or "@" in repo


def full_ref(ref: str) -> str:
    """The full name of a branch or another ref, such as `refs/heads/main`."""
    return ref if ref.startswith("refs/") else f"refs/heads/{ref}"


class RevisionRange(_Record):
    """The commits of one ref that a job is for: the commits after `old_sha`, up to and including
    `new_sha`.

    `old_sha` says only where the commits come from. A retraining does not start from `old_sha`: it
    compares the rows at `new_sha` with the rows that the parent release was trained on. The parent
    release is the release from which the job continues, normally the served release.
    """

    repo: str
    """`owner/name` on a hub, or the git URL of a repository elsewhere."""
    ref: str
    """The full name of the ref, such as `refs/heads/main`."""
    old_sha: str | None = None
    """The commit of the pipeline's last push job before this one. None if there was none."""
    new_sha: str | None = None
    """The commit to train on. None means the head of the ref: the store reads the head when a
    runner takes the job, and writes it here."""
    delivery_ids: tuple[str, ...] = ()
    """The ids of all deliveries that led to the job, oldest first."""


class Resources(BaseModel):
    """What an engine, such as Slurm, should give to each job. The engine's own default counts for a
    key that is not set."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    cpus: int | None = Field(default=None, ge=1)
    """The number of processor cores."""
    memory: str | None = Field(default=None, pattern=r"^[1-9]\d*[KMGT]$")
    """The main memory: a whole number and K, M, G or T (powers of 1024), such as `16G`."""
    gpus: int | None = Field(default=None, ge=1)
    """The number of GPUs of each machine."""
    nodes: int | None = Field(default=None, ge=1)
    """The number of machines."""
    image: str | None = Field(default=None, min_length=1)
    """The container image to run. It must contain hotpush."""
    queue: str | None = Field(default=None, min_length=1)
    """The queue: a partition of Slurm, or a flavor of Hugging Face Jobs."""
    timeout_seconds: float | None = Field(default=None, gt=0)
    """After this time, the engine ends an attempt of the job. `timeout_seconds` under [jobs] limits
    all attempts together."""

    @property
    def memory_bytes(self) -> int | None:
        return None if self.memory is None else int(self.memory[:-1]) << _SHIFTS[self.memory[-1]]


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
    """More environment variables, encrypted by `jobs.job.seal`. None if the job has no secrets."""
    settings: dict[str, Any] = {}
    """Settings for the command, which reads them from `spec.json`. The job store does not interpret
    them."""
    launcher: str = LOCAL
    """Where the job runs: `local` for the runner's machine, or the name of a launcher in the
    runner's settings."""
    resources: Resources = Resources()
    """What a launcher asks its engine for."""
    revisions: RevisionRange | None = None
    """The commits that led to the job. None if no commit led to it."""
    max_attempts: int = Field(default=3, ge=1)
    """The job fails when this many of its attempts were lost (for example, because the process was
    killed) or failed for a temporary cause. If an attempt fails for another cause, the job fails at
    once. A plain command also fails at once if its process was killed. An attempt that ended
    because its runner was stopped does not count."""
    timeout_seconds: float | None = Field(default=None, gt=0)
    """How long this job may run, all attempts together, instead of the runner's setting of the same
    name. None means that the runner's setting counts."""
    debounce_seconds: float = Field(default=0.0, ge=0)
    """A pending job may start once no delivery has arrived for this long."""
    max_wait_seconds: float = Field(default=30.0, ge=0)
    """A pending job may start once this long has passed since its first delivery, even if more
    deliveries keep arriving."""
    labels: dict[str, str] = {}
    """Names and values, mostly for people. The job store does not interpret them. But the runner
    interprets the label `webhook`: it marks a copy of a job, and names the webhook that started the
    copy. Such a copy does not get the secret of the stack's webhook in `WEBHOOK_SECRET`."""
