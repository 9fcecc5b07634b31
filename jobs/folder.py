"""The files of a job folder that `jobs` reads and writes, and how they are written: whole or not.

The command adds files of its own beside them. Standard library only: a launcher's processes
import this module before they become the command.
"""

import itertools
import json
import os
from pathlib import Path
from typing import Any

IDENTITY = "job.json"
"""Whose folder it is: ids alone start again at j000001 in every new database."""
SPEC = "spec.json"
PAYLOAD = "payload.json"
OUTCOME = "outcome.json"
STALE = ".stale-"
"""In the name of a folder that was put aside, see `put_aside_if_of_another`."""
LOG = "log.txt"
PROCESS = "process.json"
"""Of the local launcher: attempt, pid and start time of the process that leads the session."""
EXIT = "exit.json"
"""Of the local launcher: attempt and exit code; outlives everyone who might have waited."""
LOCK = ".lock"
"""Held by the leading process, so that two attempts of a job can never run side by side."""
COMPUTING = "computing"
"""Beside the folders: running jobs share a lock on it, so that a server leaves them a core."""


def write_whole(path: Path, content: str, *, durable: bool = False) -> None:
    """Write beside and rename, so that a reader sees the old file or the new one.

    Only what cannot be written again has to be `durable`, that is, to survive a power cut.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with aside.open("w", encoding="utf-8") as file:
            file.write(content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    if durable:
        _sync_folder(path.parent)


def read_record(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file that `write_whole` wrote.

    None where there is no such file, or where a power cut took what was in it.
    """
    try:
        record: dict[str, Any] = json.loads(path.read_bytes())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return record


def put_aside_if_of_another(folder: Path, identity: dict[str, Any]) -> Path | None:
    """Make `folder` that of the job with this `identity`.

    A folder that another job has begun is renamed; returns where to. The job's own is left as it
    is, with all that its earlier attempts have done.
    """
    aside = None
    if (folder / SPEC).exists() and read_record(folder / IDENTITY) != identity:
        aside = _free_name(folder)
        folder.rename(aside)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / IDENTITY, json.dumps(identity))
    return aside


def _free_name(folder: Path) -> Path:
    names = (folder.with_name(f"{folder.name}{STALE}{n}") for n in itertools.count(1))
    return next(name for name in names if not name.exists())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
