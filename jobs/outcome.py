"""`JobOutcome`: how a job ended, with the ids of its deliveries, its dataset commit and releases.

A retraining job writes `outcome.json` as its last step, and the runner reads that file. If there is
no such file, the runner makes the outcome from the exit status of the job's process.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict

from jobs.counts import Counts

OutcomeResult = Literal[
    "promoted",  # a new release is served
    "published",  # a new release is on disk, but no server was up to serve it
    "rejected",  # the gate found that the new weights are worse
    "unchanged",  # the commit changed no row
    "superseded",  # the server got another release before it took the job's release
    "failed",
    "cancelled",
]


class JobOutcome(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    result: OutcomeResult
    stage: str | None = None
    """Where the job ended: a stage of the retraining, or `launch`, `timeout` or `lost` from the
    runner. None if no stage is known."""
    reason: str | None = None
    """One line for a person: the value, the cause and what to do. None if all went well."""
    exit_code: int | None = None
    """The command's exit code; negative if a signal ended it, None if no process has ended."""
    delivery_ids: tuple[str, ...] = ()
    job_id: str | None = None
    dataset_revision: str | None = None
    release: str | None = None
    """The release that this job published."""
    parent_release: str | None = None
    """The release whose weights the training started from."""
    served_release: str | None = None
    """The release that the server served when the job ended. None if the job does not know the
    release."""
    may_pass: bool = False
    """Whether the failure has a temporary cause, such as a full disk. The job may then get another
    attempt."""
    counts: Counts | None = None
    """What the new weights learned and kept. None if the job ended before it measured this."""
