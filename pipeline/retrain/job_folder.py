"""The files in a job's folder. Most stages of a job leave a record there: a JSON file that is
written completely or not at all."""

from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from serving.weights.atomic_file import write_atomically

Record = TypeVar("Record", bound=BaseModel)

SNAPSHOT = "snapshot.json"
BASE = "base.json"
CHECKPOINT = "checkpoint.json"
EVALUATION = "evaluation.json"
RELEASE = "release.json"
METRICS = "metrics.jsonl"
CHECKPOINTS_DIR = "checkpoints"


def write_record(path: Path, record: BaseModel) -> None:
    """Write `record` to `path` as JSON. After a crash or a power cut, the file is either complete
    or unchanged. Raises OSError."""
    write_atomically(path, record.model_dump_json(indent=2) + "\n")


def read_record(path: Path, kind: type[Record]) -> Record | None:
    """The record at `path`. None if there is no file, or if it is not a valid record."""
    try:
        return kind.model_validate_json(path.read_bytes())
    except (FileNotFoundError, ValidationError):
        return None
