"""Records that a person made the server serve an older release than before, so that `pipeline
status` can say who did, and what the next push will do."""

import getpass
import json
import os
import time
from pathlib import Path
from typing import Any

from jobs.counts import Counts
from jobs.folder import read_json, write_atomically
from serving.errors import ReleaseError
from serving.weights.release_store import load_release, release_number

FILE = "went-back.json"


def record_going_back(pipeline_dir: Path, former: str | None, release: str) -> None:
    """Does nothing if `release` is not older than `former`."""
    if former is None or release_number(release) >= release_number(former):
        return
    job = os.environ.get("JOB_ID")
    by = _user() if job is None else f"job {job}"
    record = {"former": former, "release": release, "by": by, "at": time.time()}
    write_atomically(pipeline_dir / FILE, json.dumps(record))


def went_back(pipeline_dir: Path, served: str) -> dict[str, Any] | None:
    """The record, and the number of changed rows that the served release has not learned. None if
    nobody went back to the served release."""
    record: dict[str, Any] | None = read_json(pipeline_dir / FILE)
    if record is None or record["release"] != served:
        return None
    return record | {"changed_rows": _changed_rows(pipeline_dir, record["former"], served)}


def _changed_rows(pipeline_dir: Path, former: str, served: str) -> int:
    total, release = 0, former
    while release_number(release) > release_number(served):
        try:
            found = load_release(pipeline_dir / release)
        except ReleaseError:
            break
        counts = (found.evaluation or {}).get("counts")
        total += Counts.model_validate(counts).all_changed if counts else 0
        if found.lineage.parent is None:
            break
        release = found.lineage.parent
    return total


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # the system knows no name
        return f"user {os.getuid()}"
