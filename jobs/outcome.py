"""`JobOutcome`: how a job ended, for which deliveries and which dataset commit, and which releases
the job read and made. A release is a set of weights that can be served.

As its last step, a retraining job writes its outcome to `outcome.json`, and the runner reads that
file. If there is no such file, the runner derives the outcome from the exit status of the process.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict

from jobs.counts import Counts

OutcomeResult = Literal[
    "promoted",  # a new release is served
    "published",  # a new release is on disk, but no server was up to serve it
    "rejected",  # the new weights failed the checks of the pipeline's gate
    "unchanged",  # there was nothing to train on
    "superseded",  # somebody asked for another release before the job's release was served
    "failed",
    "cancelled",
]


class JobOutcome(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    result: OutcomeResult
    stage: str | None = None
    """The stage in which the job ended. The job writes a stage of the retraining; the runner writes
    `launch`, `timeout` or `lost`. None if no stage is known."""
    reason: str | None = None
    """Why the job ended in this way, for a person. None if there is nothing to explain."""
    exit_code: int | None = None
    """The command's exit code, negative if a signal ended the command. None if it is not known."""
    delivery_ids: tuple[str, ...] = ()
    job_id: str | None = None
    dataset_revision: str | None = None
    release: str | None = None
    """The release that this job published."""
    parent_release: str | None = None
    """The release whose weights the training started from."""
    served_release: str | None = None
    """The release that the server served when the job ended. None if the job does not know it."""
    may_pass: bool = False
    """Whether the failure has a temporary cause, such as a full disk. The job then gets another
    attempt, unless this was its last attempt or a newer job takes over its commits."""
    counts: Counts | None = None
    """How many rows were learned and kept. None if the job ended before it counted them."""
