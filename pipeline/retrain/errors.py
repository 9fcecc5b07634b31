"""The errors of a retraining job. Each message names the value, the cause and what to do.

RetrainError
├── SnapshotError      the dataset revision could not be fetched
│   └── HubAway        the hub does not answer now, but may answer later
├── DataError          a file or a row of the dataset cannot be used
├── BaseModelError     the base model is missing or cannot be trained
│   └── BaseModelAway  the base model's hub does not answer now, but may answer later
├── TrainError         the training stopped before its end
├── PromoteError       the release is published, but the server did not take it
│   └── SwapMaySucceedLater
└── TemporaryError     the next attempt may succeed: HubAway, BaseModelAway, SwapMaySucceedLater
"""

from pathlib import Path
from typing import NoReturn

from pipeline.errors import PipelineError


class RetrainError(PipelineError):
    """The job fails at its current stage. The server goes on with the release that it serves."""


class TemporaryError(RetrainError):
    """The next attempt of the job may succeed."""


class SnapshotError(RetrainError):
    """The dataset's revision could not be fetched."""


class HubAway(SnapshotError, TemporaryError):
    """The hub cannot be reached, or is too busy to answer."""


class DataError(RetrainError):
    """A file or a row of the dataset cannot be used for training."""

    def __init__(self, problem: str, place: str | None = None) -> None:
        super().__init__(problem if place is None else f"{place}: {problem}")
        self.problem, self.place = problem, place

    @classmethod
    def at(cls, file: str | Path, line: int | None, problem: str) -> "DataError":
        return cls(problem, f"{file}, line {line}" if line is not None else f"{file}")


class BaseModelError(RetrainError):
    """The base model is missing, or cannot be trained."""


class BaseModelAway(BaseModelError, TemporaryError):
    """The hub of the base model cannot be reached, or is too busy to answer."""


class TrainError(RetrainError):
    """The training stopped before its end."""


class CheckpointUnreadable(TrainError, TemporaryError):
    """The next attempt begins again."""


class PromoteError(RetrainError):
    """The server refused the release, or could not swap to it."""


class SwapMaySucceedLater(PromoteError, TemporaryError):
    """The server found no fault in the release, but long requests held up the swap, its engine or
    disk failed, or it was shutting down."""


def fail(error: RetrainError) -> NoReturn:
    """Raise the error. For a caller that does not collect errors."""
    raise error
