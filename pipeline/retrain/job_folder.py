"""The job's folder: one record per stage, each written whole or not at all."""

from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from serving.weights.atomic_file import write_atomically

Record = TypeVar("Record", bound=BaseModel)

SPEC = "spec.json"
SNAPSHOT = "snapshot.json"
BASE = "base.json"
CHECKPOINT = "checkpoint.json"
EVALUATION = "evaluation.json"
RELEASE = "release.json"
OUTCOME = "outcome.json"
METRICS = "metrics.jsonl"
CHECKPOINTS_DIR = "checkpoints"


def write_record(path: Path, record: BaseModel) -> None:
    """Write `record` to `path` as JSON: whole, on disk, or not at all. Raises OSError."""
    write_atomically(path, record.model_dump_json(indent=2) + "\n")


def read_record(path: Path, kind: type[Record]) -> Record | None:
    """The record at `path`; None where there is none, or none that a stage could go on from."""
    try:
        return kind.model_validate_json(path.read_bytes())
    except (FileNotFoundError, ValidationError):
        return None
