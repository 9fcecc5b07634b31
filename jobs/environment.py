"""The environment of a job's process. Pure: from records to a dict, reading no file or variable."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jobs.folder import PAYLOAD
from jobs.record import Job

MAX_INLINE_BYTES = 96 * 1024
"""Linux refuses to start a process with one variable of 128 KiB or more."""

COMMITTER_DOMAIN = "jobs.hotpush.invalid"
"""Of the committer's address in a job: what it commits can be told from what people commit."""

_THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "RAYON_NUM_THREADS",
)


def thread_variables(num_threads: int) -> dict[str, str]:
    """What numeric libraries read when they are loaded."""
    return dict.fromkeys(_THREAD_VARIABLES, str(num_threads))


def job_environment(
    job: Job,
    job_dir: Path,
    given: Mapping[str, str],
    *,
    num_threads: int,
    unsealed: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """All variables of the job's process: the runner's `given`, the spec's, then the job's own.

    What it commits with git names it as the committer. `unsealed` is what the spec's `sealed_env`
    holds.

    A payload gives `WEBHOOK_PAYLOAD` (cut where it is too long for a variable),
    `WEBHOOK_PAYLOAD_FILE` (always whole), `WEBHOOK_REPO_ID`, `WEBHOOK_REPO_TYPE` and `WEBHOOK_ID`.
    """
    variables = {
        **given,
        **thread_variables(job.spec.resources.num_threads or num_threads),
        "PYTHONUNBUFFERED": "1",
        "GIT_COMMITTER_NAME": f"job {job.id}",
        "GIT_COMMITTER_EMAIL": f"{job.id}@{COMMITTER_DOMAIN}",
        **job.spec.env,
        **(unsealed or {}),
        "JOB_ID": job.id,
        "JOB_DIR": str(job_dir),
    }
    if job.payload is not None:
        variables["WEBHOOK_PAYLOAD"] = inline_payload(job.payload)
        variables["WEBHOOK_PAYLOAD_FILE"] = str(job_dir / PAYLOAD)
        for name, section, field in (
            ("WEBHOOK_REPO_ID", "repo", "name"),
            ("WEBHOOK_REPO_TYPE", "repo", "type"),
            ("WEBHOOK_ID", "webhook", "id"),
        ):
            part = job.payload.get(section)
            if isinstance(part, dict) and isinstance(part.get(field), str):
                variables[name] = part[field]
    return variables


def inline_payload(payload: dict[str, Any], max_bytes: int = MAX_INLINE_BYTES) -> str:
    """The payload as JSON of at most `max_bytes`, valid in any case.

    A longer one has its lists and texts cut, and says so: `"truncated": true`, and
    `"updatedFilesTruncated": true` where it lists files.
    """
    whole = json.dumps(payload)
    if len(whole) <= max_bytes:
        return whole
    flags = {"truncated": True}
    if "updatedFiles" in payload:
        flags["updatedFilesTruncated"] = True
    num_items, num_characters = 4096, 16384
    while num_items >= 8:
        cut = json.dumps({**_cut(payload, num_items, num_characters), **flags})
        if len(cut) <= max_bytes:
            return cut
        num_items, num_characters = num_items // 2, num_characters // 2
    # Not a payload of any hub's: what is left is what a handler needs to find the rest.
    kept = {name: payload[name] for name in ("event", "repo", "webhook") if name in payload}
    cut = json.dumps({**_cut(kept, 8, 64), **flags})
    return cut if len(cut) <= max_bytes else json.dumps(flags)


def _cut(value: Any, num_items: int, num_characters: int) -> Any:
    match value:
        case str():
            return value[:num_characters]
        case list():
            return [_cut(item, num_items, num_characters) for item in value[:num_items]]
        case dict():
            return {name: _cut(item, num_items, num_characters) for name, item in value.items()}
        case _:
            return value
