"""`Job` and the transitions between its states. `JobRequest` and `Submission` are the input and the
result of submitting a job. The docstring of the package `jobs` explains terms such as lease, lost
and push job."""

from collections.abc import Callable, Mapping
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
"""State → the states that may follow it. A job is pending while its state is SCHEDULING.

Between two attempts, a job stays RUNNING. It must not become pending again: a pending job trains
on the head of its ref, but the head of a job that has started is already chosen.
"""

OPEN_STATES = tuple(state for state, following in TRANSITIONS.items() if following)
"""The states of jobs that have not ended."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job as it was when it was read from the store. Times are seconds since the epoch, by the
    store's clock (`JobStore.open`)."""

    id: str
    """`j` and a number, as in `j000012`. A store never gives the same id to two jobs."""
    state: JobState
    spec: JobSpec
    payload: dict[str, Any] | None
    """The payload that a hub would send if somebody pushed the commit that the job is for. Before
    the job has this commit, it is the payload of the last delivery. If a person gave a payload, it
    is that payload. None if the job has no payload."""
    outcome: JobOutcome | None
    """How the job ended. None while the job has not ended, and for a job whose command exited with
    0 and wrote no outcome."""
    last_failure: JobOutcome | None = None
    """How the last attempt failed. None unless the job waits for its next attempt because an
    attempt was lost or failed for a temporary cause."""
    created_at: float
    run_after: float
    """When a pending job may start. Each delivery may postpone the start. If an
    attempt was lost or failed for a temporary cause, this is when the next attempt may start."""
    started_at: float | None
    """The time from which the job's time limit is counted. At first, this is when a runner took the
    job from the store (`JobStore.claim`). Periods in which the job has no runner, or waits for its
    next attempt, do not count against the limit. So `started_at` is moved later by the length of
    each such period. None if no runner has taken the job yet."""
    ended_at: float | None
    """When the job ended. None while it has not ended."""
    attempt: int
    """Number of the current attempt; 0 while the job is pending."""
    num_lost: int
    """How many attempts were lost or failed for a temporary cause. Attempts that were lost because
    their runner was stopped do not count. When this number reaches `spec.max_attempts`, the job
    fails."""
    owner: str | None
    """Who holds the lease: a text that names the runner, and is different for each attempt. It
    stays here after the lease has run out, until a runner has ended the attempt. None while the job
    is pending or waits for its next attempt, and after it has ended."""
    lease_until: float | None
    """When the lease runs out, unless a heartbeat extends it. If the job waits for its next
    attempt, when the last attempt ended. None while the job is pending, and after it has ended."""
    handle: str | None
    """The agent of the current attempt (`jobs.process.name_of`). None if the agent has
    not begun the attempt yet."""
    cancel_requested: bool
    """Whether somebody asked to cancel the job while it was running."""
    by_hand: bool
    """Whether a person submitted the job. Such a job gets no deliveries. It may be pending at the
    same time as a push job of the same pipeline."""
    waits_for: str | None = None
    """Why a pending job is not started although it may be due: its pipeline is paused, another job
    of the pipeline is running, or the head of its ref cannot be read. None otherwise."""

    @property
    def identity(self) -> dict[str, Any]:
        """The content of `job.json`, the file that says which job the folder belongs to (`IDENTITY`
        in `jobs/folder.py`)."""
        return {"id": self.id, "created_at": self.created_at}

    @property
    def has_ended(self) -> bool:
        return not TRANSITIONS[self.state]

    @property
    def trains_head(self) -> bool:
        """Whether the job is for the head of a ref, and this head was not read yet."""
        return self.spec.revisions is not None and self.spec.revisions.new_sha is None


@dataclass(frozen=True, kw_only=True)
class Head:
    """The newest commit of a job's ref."""

    sha: str
    payload: dict[str, Any]
    """The payload that a hub would send for a push of this commit."""


FindHead = Callable[[Job], Head]
"""Reads the head of the job's ref. The job's spec already has the right `old_sha`. Raises HeadAway
or NoHead. It must return within some seconds, because the runner does nothing else meanwhile."""


@dataclass(frozen=True, kw_only=True)
class Delivery:
    source: str
    """Where the delivery came from: a text that contains the id of the webhook. Two deliveries with
    the same source never have the same id. If the receiver submits a job for the delivery, the
    source also contains the name of the pipeline, because one delivery may lead to jobs of several
    pipelines."""
    id: str


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """The arguments of `JobStore.submit` for one submission."""

    spec: JobSpec
    payload: dict[str, Any] | None = None
    delivery: Delivery | None = None
    by_hand: bool = False


@dataclass(frozen=True, kw_only=True)
class Submission:
    job: Job
    """The job without its delivery ids, because there may be many. `JobStore.get` reads the ids."""
    is_new: bool
    """Whether the submission created `job`."""
    how: Literal["created", "merged", "duplicate"]
    """`merged`: the delivery was linked to the pipeline's pending job. `duplicate`: `job` already
    had the delivery."""


def final_state(outcome: JobOutcome | None) -> JobState:
    """The state in which a job ends. An `outcome` of None means that the command exited with 0 and
    wrote no outcome."""
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
    """The ids of the deliveries that led to the job, in the order of their arrival."""
    return () if job.spec.revisions is None else job.spec.revisions.delivery_ids


def failure(
    job: Job, *, stage: str | None, reason: str, exit_code: int | None = None
) -> JobOutcome:
    """The outcome `failed`, for a job that did not write a valid outcome itself."""
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
