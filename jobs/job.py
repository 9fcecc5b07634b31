"""`Job` and its state transitions, and the records for submitting jobs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from jobs.outcome import JobOutcome
from jobs.spec import JobSpec

JobState = Literal["SCHEDULING", "RUNNING", "COMPLETED", "ERROR", "CANCELED"]

TRANSITIONS: Mapping[JobState, frozenset[JobState]] = {
    "SCHEDULING": frozenset({"RUNNING", "CANCELED"}),
    "RUNNING": frozenset({"COMPLETED", "ERROR", "CANCELED"}),
    "COMPLETED": frozenset(),
    "ERROR": frozenset(),
    "CANCELED": frozenset(),
}
"""A job that is attempted again stays RUNNING. Newer commits then get a pending job of their own,
because a job that has started never absorbs a commit."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job as the store had it when it was read. Times are seconds since the epoch, by the store's
    clock."""

    id: str
    """`j` and a counter, as in `j000012`. No two jobs of a store ever have the same id."""
    state: JobState
    spec: JobSpec
    payload: dict[str, Any] | None
    """The webhook's payload as it was received. A retraining that was submitted by hand gets the
    payload that its hub would have sent; a plain command may have no payload."""
    outcome: JobOutcome | None
    """None while the job has not ended, and for a plain command that exited with 0."""
    created_at: float
    run_after: float
    """When a pending job may start. Each commit that the job absorbs may postpone the start. If an
    attempt failed for a temporary cause, this is when the next attempt may start."""
    started_at: float | None
    """When the first attempt started. The time in which the job had no runner, or waited for its
    next attempt, is added, so that it does not count against the job's time limit."""
    ended_at: float | None
    attempt: int
    """Number of the current attempt; 0 while the job is pending."""
    num_lost: int
    """How many attempts were lost or failed for a temporary cause. When this number reaches
    `spec.max_attempts`, the job fails."""
    owner: str | None
    """The runner that holds the lease."""
    lease_until: float | None
    handle: str | None
    """The launcher's handle of the current attempt."""
    cancel_requested: bool
    by_hand: bool
    """Whether a person submitted the job. Such a job absorbs no push. It may be pending at the same
    time as the pipeline's job of pushes."""

    @property
    def has_ended(self) -> bool:
        return not TRANSITIONS[self.state]


@dataclass(frozen=True, kw_only=True)
class Delivery:
    source: str
    """Who chose the delivery's id, such as a webhook. Ids are unique only within one source."""
    id: str
    body: str
    """The JSON as it was received. It is stored for people who examine the delivery; no code reads
    it."""


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """One submission, with the arguments of `JobStore.submit`."""

    spec: JobSpec
    payload: dict[str, Any] | None = None
    delivery: Delivery | None = None
    by_hand: bool = False


@dataclass(frozen=True, kw_only=True)
class Submission:
    job: Job
    """The job without its delivery ids, because there may be many. `JobStore.get` reads the ids."""
    is_new: bool
    """Whether this call created `job`."""
    how: Literal["created", "merged", "duplicate"]
    """`merged`: the pipeline's pending job absorbed the submission. `duplicate`: the delivery, or
    the dedupe key, was seen before."""


def final_state(outcome: JobOutcome | None) -> JobState:
    """The state in which a job ends. An `outcome` of None means that a plain command exited with
    0."""
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
    """The outcome that a runner gives to a job that has not written an outcome."""
    return JobOutcome(
        result="failed",
        stage=stage,
        reason=reason,
        exit_code=exit_code,
        delivery_ids=delivery_ids(job),
        job_id=job.id,
        dataset_revision=None if job.spec.revisions is None else job.spec.revisions.new_sha,
    )


def log_fields(job: Job) -> dict[str, object]:
    """Fields for structured logs."""
    return {
        "job_id": job.id,
        "pipeline": job.spec.pipeline,
        "delivery_ids": list(delivery_ids(job)),
    }
