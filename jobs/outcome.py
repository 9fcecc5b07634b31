"""`JobOutcome`: how a job ended, and the ids of every hop that led there.

A job writes `outcome.json` as its last act; the runner reads it. A job that ended without one died.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict

OutcomeResult = Literal[
    "promoted",  # a new release is served
    "published",  # a new release is on disk; no server was up to take it
    "rejected",  # the gate found the new weights worse
    "unchanged",  # the commit changed no row
    "superseded",  # a newer release was taken instead
    "failed",
    "cancelled",
]


class JobOutcome(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    result: OutcomeResult
    stage: str | None = None
    """Where it ended: a stage of the retraining, or `launch`, `timeout`, `lost` of the runner."""
    reason: str | None = None
    """One line for a person: the value, the cause and what to do. None where all went well."""
    exit_code: int | None = None
    """Of the command; negative for a signal, None where no process ended."""
    delivery_ids: tuple[str, ...] = ()
    job_id: str | None = None
    dataset_revision: str | None = None
    release: str | None = None
    """The release that this job published."""
    parent_release: str | None = None
    """The release that it trained from."""
    served_release: str | None = None
    """What the server answered from when the job ended, where the job knows it."""
