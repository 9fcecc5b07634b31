"""`Job`: where a job stands, frozen, and the moves that its state allows; what leads to one."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from jobs.outcome import JobOutcome
from jobs.spec import JobSpec

JobState = Literal["SCHEDULING", "RUNNING", "COMPLETED", "ERROR", "CANCELED"]

MOVES: Mapping[JobState, frozenset[JobState]] = {
    "SCHEDULING": frozenset({"RUNNING", "CANCELED"}),
    "RUNNING": frozenset({"COMPLETED", "ERROR", "CANCELED"}),
    "COMPLETED": frozenset(),
    "ERROR": frozenset(),
    "CANCELED": frozenset(),
}
"""A job that is attempted again stays RUNNING, so that the pending job beside it is a job of its
own: nothing that has begun ever absorbs a newer commit."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """Times are seconds since the epoch, by the store's clock."""

    id: str
    """`j` and a counter, as in `j000012`; never given twice."""
    state: JobState
    spec: JobSpec
    payload: dict[str, Any] | None
    """The webhook's payload as it was received; None for a job that was started by hand."""
    outcome: JobOutcome | None
    """None while the job has not ended, and for a plain command that exited with 0."""
    created_at: float
    run_after: float
    """A pending job is not claimed before; each absorbed commit may move it."""
    started_at: float | None
    """Of the first attempt."""
    ended_at: float | None
    attempt: int
    """How often the job was started; 0 while it is pending."""
    num_lost: int
    """Attempts whose process vanished; at `spec.max_attempts` the job fails."""
    owner: str | None
    """The runner that holds the lease."""
    lease_until: float | None
    handle: str | None
    """What the launcher knows the current attempt by."""
    cancel_requested: bool

    @property
    def has_ended(self) -> bool:
        return not MOVES[self.state]


@dataclass(frozen=True, kw_only=True)
class Delivery:
    source: str
    """Whose ids these are: a webhook id, or the name of a sender."""
    id: str
    body: str
    """The raw JSON, kept for a replay."""


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """What is submitted; see `JobStore.submit`."""

    spec: JobSpec
    payload: dict[str, Any] | None = None
    delivery: Delivery | None = None
    joins: bool = True


@dataclass(frozen=True, kw_only=True)
class Submission:
    job: Job
    """Without the deliveries that it answers for, which may be many: `JobStore.get` names them."""
    is_new: bool
    """Whether `job` was created by this call."""
    how: Literal["created", "merged", "duplicate"]
    """`merged` into the pipeline's pending job; `duplicate` of a delivery, or by dedupe key."""


def state_after(outcome: JobOutcome | None) -> JobState:
    """The state that a running job ends in; None is a plain command that exited with 0."""
    if outcome is None:
        return "COMPLETED"
    match outcome.result:
        case "failed":
            return "ERROR"
        case "cancelled":
            return "CANCELED"
        case _:
            return "COMPLETED"


def delivery_ids(job: Job) -> tuple[str, ...]:
    """The deliveries that the job answers for, oldest first."""
    return () if job.spec.revisions is None else job.spec.revisions.delivery_ids


def failure(
    job: Job, *, stage: str | None, reason: str, exit_code: int | None = None
) -> JobOutcome:
    """The outcome that a runner writes for a job that left none."""
    return JobOutcome(
        result="failed",
        stage=stage,
        reason=reason,
        exit_code=exit_code,
        delivery_ids=delivery_ids(job),
        job_id=job.id,
        dataset_revision=None if job.spec.revisions is None else job.spec.revisions.new_sha,
    )
