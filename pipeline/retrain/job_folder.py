"""The job's folder: one record per stage, each written whole or not at all."""

import os
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from serving.weights.releases import fsync_dir

Record = TypeVar("Record", bound=BaseModel)

SPEC = "spec.json"
SNAPSHOT = "snapshot.json"
CHECKPOINT = "checkpoint.json"
EVALUATION = "evaluation.json"
RELEASE = "release.json"
OUTCOME = "outcome.json"
METRICS = "metrics.jsonl"
CHECKPOINTS_DIR = "checkpoints"


def write_record(path: Path, record: BaseModel) -> None:
    """Write `record` as JSON: aside, to disk, then over `path` in one rename."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    with aside.open("w", encoding="utf-8") as file:
        file.write(record.model_dump_json(indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)
    fsync_dir(path.parent)


def read_record(path: Path, kind: type[Record]) -> Record | None:
    """The record at `path`; None where there is none, or none that a stage could go on from."""
    try:
        return kind.model_validate_json(path.read_bytes())
    except (FileNotFoundError, ValidationError):
        return None
