"""What can go wrong in a retraining job. Each message names the value, the cause and what to do.

RetrainError
├── SnapshotError    the hub did not give the revision
│   └── HubAway      it does not answer now, and may a moment later
├── DataError        a file or row cannot be learned from
├── BaseModelError   the base model is missing or unusable
├── TrainError       training broke off
└── PromoteError     the release exists; the server did not take it
"""

from pathlib import Path

from pipeline.errors import PipelineError


class RetrainError(PipelineError):
    """The job fails at this stage; the served release stays."""


class SnapshotError(RetrainError):
    """The dataset's revision could not be fetched."""


class HubAway(SnapshotError):
    """The connection to the hub failed."""


class DataError(RetrainError):
    """The dataset's rows cannot be learned from."""

    @classmethod
    def at(cls, file: str | Path, line: int | None, problem: str) -> "DataError":
        place = f"{file}, line {line}" if line is not None else f"{file}"
        return cls(f"{place}: {problem}")


class BaseModelError(RetrainError):
    """The base model is missing, or is not one that can be trained."""


class TrainError(RetrainError):
    """Training broke off."""


class PromoteError(RetrainError):
    """The server refused the release or could not take it."""
