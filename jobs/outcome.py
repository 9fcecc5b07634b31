"""`JobOutcome`: how a job ended, with the ids of its deliveries, its dataset commit and releases.

A retraining job writes `outcome.json` as its last step, and the runner reads that file. If a job
leaves no such file, the runner makes the outcome from the job's exit status.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict

from jobs.counts import Counts

OutcomeResult = Literal[
    "promoted",  # a new release is served
    "published",  # a new release is on disk, but no server was up to serve it
    "rejected",  # the gate found that the new weights are worse
    "unchanged",  # the commit changed no row
    "superseded",  # a newer release was chosen while the job ran
    "failed",
    "cancelled",
]


class JobOutcome(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    result: OutcomeResult
    stage: str | None = None
    """Where the job ended: a stage of the retraining, or the runner's `launch`, `timeout` or
    `lost`."""
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
    """The release that the server served when the job ended; None if the job does not know it."""
    may_pass: bool = False
    """Whether the cause of a failure can pass by itself. The job then gets another attempt."""
    counts: Counts | None = None
    """What was learned and kept; None if the job ended before it measured this."""
