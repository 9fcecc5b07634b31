"""Prepares the folder of a job, and names the files that the package `jobs` reads and writes there.

A job's command adds its own files to the folder. The module uses only the standard library.
"""

import json
import mmap
import os
import shutil
from pathlib import Path
from typing import Any

from jobs.errors import is_temporary

IDENTITY = "job.json"
"""Says which job the folder belongs to. The job id in the folder's name is not enough: a new
database numbers its jobs from j000001 again, so an old folder may have the name of a new job."""
SPEC = "spec.json"
"""The agent writes the job's `JobSpec` into this file, for the command to read."""
PAYLOAD = "payload.json"
"""The agent writes the payload of the webhook's delivery into this file, if the job has one."""
OUTCOME = "outcome.json"
"""The command may write its `JobOutcome` into this file. A retraining does so as its last step.
When the job's next attempt begins, this file is removed."""
LOG = "log.txt"
"""The output of the command, from all attempts of the job."""
METRICS = "metrics.jsonl"
"""A retraining appends its progress to this file."""
COMPUTING = "computing"
"""This file is in the folder that contains all job folders. The agent of every running job holds a
shared lock on this file. While any agent holds the lock, a completion server with the torch engine
computes with one thread fewer, so that a core stays free for the jobs."""


def write_by_rename(path: Path, content: str, *, durable: bool = False, mode: int = 0o666) -> None:
    """Write to a temporary file and rename it, so that a reader sees either the complete old
    content or the complete new content.

    With `durable`, the file also survives a power cut. Use `durable` for content that cannot be
    produced a second time. `mode` has the permissions of a file that this user's umask allows.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.touch(mode)
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
        fsync_dir(path.parent)


def read_json(path: Path) -> Any:
    """The JSON in a file that `write_by_rename` wrote. None if the file is missing, or if it is
    not valid JSON because a power cut lost its content. Raises OSError."""
    try:
        return json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError, RecursionError):
        return None


def is_of_another_job(folder: Path, identity: dict[str, Any]) -> bool:
    """Whether a job of another database has left this folder. It is removed when an attempt of the
    job with this `identity` begins. True if nobody can tell whose folder it is. Raises OSError if
    `job.json` cannot be read for a temporary cause."""
    try:
        return read_json(folder / IDENTITY) not in (None, identity)
    except OSError as error:
        if is_temporary(error):
            raise
        return True


def read_log(folder: Path, identity: dict[str, Any], offset: int) -> bytes:
    """Up to a MiB of the job's log, starting at byte `offset`. Empty if there is no log yet."""
    if is_of_another_job(folder, identity):
        return b""
    try:
        with (folder / LOG).open("rb") as log:
            log.seek(offset)
            return log.read(1 << 20)
    except FileNotFoundError:
        return b""


def tail_offset(folder: Path, identity: dict[str, Any], num_lines: int) -> int:
    """The byte at which the last `num_lines` lines of the job's log begin. 0 if it has fewer."""
    if is_of_another_job(folder, identity):
        return 0
    try:
        with (
            (folder / LOG).open("rb") as log,
            mmap.mmap(log.fileno(), 0, access=mmap.ACCESS_READ) as text,
        ):
            # The newline at the end begins no line.
            at = len(text) - (text[-1:] == b"\n")
            for _ in range(num_lines):
                if (at := text.rfind(b"\n", 0, at)) < 0:
                    return 0
            return min(at + 1, len(text))
    except (FileNotFoundError, ValueError):  # there is no log, or it is empty
        return 0


def prepare_job_folder(folder: Path, identity: dict[str, Any]) -> None:
    """Make sure that `folder` exists and belongs to the job with this `identity`, which is the
    content of `job.json`. Removes a folder that a job of another database has left. A folder that
    belongs to this job keeps all files of earlier attempts."""
    if (folder / SPEC).exists() and read_json(folder / IDENTITY) != identity:
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_by_rename(folder / IDENTITY, json.dumps(identity))


def fsync_dir(folder: Path) -> None:
    """Make the renames in `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
