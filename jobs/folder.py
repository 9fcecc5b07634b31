"""Names the files in a job's folder that `jobs` reads and writes, and prepares the folder.

A job's command adds its own files to the folder. This module uses the standard library only,
because every process of a launcher imports it before it becomes the command.
"""

import itertools
import json
import os
from pathlib import Path
from typing import Any

IDENTITY = "job.json"
"""Says which job the folder belongs to. The id in the folder's name is not enough, because every
new database starts again at j000001."""
SPEC = "spec.json"
PAYLOAD = "payload.json"
OUTCOME = "outcome.json"
STALE = ".stale-"
"""`prepare_job_folder` adds this and a number to the name of a folder that belongs to a job of
another database."""
LOG = "log.txt"
PROCESS = "process.json"
"""Written by `jobs/launchers/supervise.py`: the attempt, and the pid and start time of the process
that leads the job's session."""
EXIT = "exit.json"
"""Written by `jobs/launchers/supervise.py`: the attempt and its exit code. A new runner reads here
how the command ended, because only the command's parent process could wait for the command."""
LOCK = ".lock"
"""The session's leader holds a lock on this file, so that two attempts of a job never run at the
same time."""
COMPUTING = "computing"
"""A file in the folder that contains the job folders. Every running job holds a shared lock on this
file. As long as any job holds the lock, the server leaves a core to the jobs."""


def write_atomically(path: Path, content: str, *, durable: bool = False) -> None:
    """Write to a temporary file and rename it, so that a reader sees either the old or the new
    content, and never a part.

    Set `durable` for a file that must survive a power cut because nobody could write it again.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        _fsync_dir(path.parent)


def read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file that `write_atomically` wrote.

    None if the file is missing, or if a power cut lost its content.
    """
    try:
        content: dict[str, Any] = json.loads(path.read_bytes())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return content


def prepare_job_folder(folder: Path, identity: dict[str, Any]) -> Path | None:
    """Make sure that `folder` exists and belongs to the job with this `identity`.

    If the folder belongs to another job, it is renamed first. Returns the new path of the renamed
    folder; None if no folder was renamed. A folder that belongs to this job keeps all files that
    earlier attempts have left in it.
    """
    stale = None
    if (folder / SPEC).exists() and read_json(folder / IDENTITY) != identity:
        stale = _unused_stale_name(folder)
        folder.rename(stale)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / IDENTITY, json.dumps(identity))
    return stale


def _unused_stale_name(folder: Path) -> Path:
    names = (folder.with_name(f"{folder.name}{STALE}{n}") for n in itertools.count(1))
    return next(name for name in names if not name.exists())


def _fsync_dir(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
