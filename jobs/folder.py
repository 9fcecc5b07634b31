"""The files of a job folder that `jobs` reads and writes, and how they are written: whole or not.

The command adds files of its own beside them. Standard library only: a launcher's processes
import this module before they become the command.
"""

import json
import os
from pathlib import Path
from typing import Any

SPEC = "spec.json"
PAYLOAD = "payload.json"
OUTCOME = "outcome.json"
LOG = "log.txt"
PROCESS = "process.json"
"""Of the local launcher: attempt, pid and start time of the process that leads the session."""
EXIT = "exit.json"
"""Of the local launcher: attempt and exit code; outlives everyone who might have waited."""
LOCK = ".lock"
"""Held by the leading process, so that two attempts of a job can never run side by side."""


def write_whole(path: Path, content: str) -> None:
    """Write beside and rename, so that a reader sees the old file or the new one. Durable."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with aside.open("w", encoding="utf-8") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read_record(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file that `write_whole` wrote; None where there is no such file."""
    try:
        record: dict[str, Any] = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    return record
