"""`JobOutcome`: the record of how a job ended. It also names the deliveries, the dataset commit and
the releases of the job. A release is a set of weights that can be served.

As its last step, a retraining job writes its outcome to `outcome.json` in the job's folder, and the
agent reads that file. If there is no such file, the agent derives the outcome from the exit
status of the process (`jobs/attempt.py`).
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict

from jobs.counts import Counts

OutcomeResult = Literal[
    "promoted",  # a new release is served
    "published",  # a new release is on disk, but no server was up to serve it
    "rejected",  # the gate, which checks the dataset and the new weights, refused one of them
    "unchanged",  # there was nothing to train on
    "superseded",  # somebody asked for another release before the job's release was served
    "failed",
    "cancelled",
]


class JobOutcome(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    result: OutcomeResult
    stage: str | None = None
    """The stage in which the job ended: a stage of the retraining, such as `train`, or one of the
    runner's own stages `claim`, `launch`, `timeout` and `lost`. None if no stage is known."""
    reason: str | None = None
    """Why the job ended in this way, for a person. None if there is nothing to explain."""
    exit_code: int | None = None
    """The command's exit code, negative if a signal ended the command. If the command could not be
    started, the agent may have chosen it. None if it is not known."""
    delivery_ids: tuple[str, ...] = ()
    """The ids of the deliveries that led to the job, oldest first."""
    job_id: str | None = None
    dataset_revision: str | None = None
    """The dataset commit that the job trained on, or was told to train on. None if the job needs no
    dataset, or if the job ended before this commit was known."""
    release: str | None = None
    """The id of the release that this job published. None if it published none."""
    parent_release: str | None = None
    """The id of the release whose weights the training started from. None if the training started
    from the base model, or did not start."""
    may_pass: bool = False
    """Whether the failure has a temporary cause, such as a full disk. The job then gets another
    attempt, unless this was its last attempt or a newer push job is pending."""
    counts: Counts | None = None
    """How many rows the new weights learned and kept. None if the job ended before it counted."""
