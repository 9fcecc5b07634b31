"""Makes the environment variables of a job's process. This module reads no files, and it does not
read the environment variables of its own process."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jobs.folder import PAYLOAD
from jobs.job import Job

MAX_INLINE_BYTES = 96 * 1024
"""A payload with more bytes than this is shortened before it is put into a variable, because Linux
refuses to start a process if one of its variables has 128 KiB or more."""

_MAX_ITEMS, _MAX_CHARACTERS = 128, 1024
"""What is left of each list and each text of a payload that is shortened."""

COMMITTER_DOMAIN = "jobs.hotpush.invalid"
"""When a job makes a git commit, the committer's email address has this domain. So the commits of
jobs can be distinguished from the commits of people."""

_THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "RAYON_NUM_THREADS",
)


SHORT_SPINS = {"GOMP_SPINCOUNT": "3000"}
"""Limits how long a thread of PyTorch waits for other threads in a busy loop before it sleeps.

By default, OpenMP lets a thread wait a hundred times longer. If another program computes on the
same cores, such long busy waits slow down both programs: the waiting threads occupy cores that the
working threads need.
"""


def thread_variables(num_threads: int) -> dict[str, str]:
    """The variables that set the number of threads of numeric libraries. A library reads its
    variable when the library is loaded or first used."""
    return dict.fromkeys(_THREAD_VARIABLES, str(num_threads))


def job_environment(
    job: Job,
    job_dir: Path,
    runner_env: Mapping[str, str],
    *,
    num_threads: int,
    unsealed: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """All variables of the job's process.

    The variables come from the sources in this list. If several sources set the same variable, the
    last one in the list counts:

    1. `SHORT_SPINS`.
    2. `runner_env`: the variables that the runner passes on.
    3. The numbers of threads, `PYTHONUNBUFFERED`, `GIT_COMMITTER_NAME` and `GIT_COMMITTER_EMAIL`.
       The two git variables make the job the committer of its git commits.
    4. The variables of the job's spec (`env`).
    5. `unsealed`: the decrypted variables of the spec's `sealed_env`.
    6. `JOB_ID` and `JOB_DIR`.
    7. If the job has a payload: `WEBHOOK_PAYLOAD` (shortened if the payload is too long for a
       variable), `WEBHOOK_PAYLOAD_FILE` (the path of a file with the complete payload),
       `WEBHOOK_REPO_ID`, `WEBHOOK_REPO_TYPE` and `WEBHOOK_ID`.
    """
    variables = {
        **SHORT_SPINS,
        **runner_env,
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
    """The payload as valid JSON of at most `max_bytes`.

    If the payload is longer, its lists and texts are shortened, and the result also has
    `"truncated": true`. If the payload has `updatedFiles`, the shortened result also has
    `"updatedFilesTruncated": true`. If the shortened payload is still too long, the result has only
    `event`, `repo`, `webhook` and these flags, or only the flags.
    """
    complete = json.dumps(payload)
    if len(complete) <= max_bytes:
        return complete
    flags = {"truncated": True}
    if "updatedFiles" in payload:
        flags["updatedFilesTruncated"] = True
    # Keep the fields that a job needs to fetch the rest from the hub.
    least = {name: payload[name] for name in ("event", "repo", "webhook") if name in payload}
    for kept in (payload, least):
        cut = json.dumps({**_shorten(kept), **flags})
        if len(cut) <= max_bytes:
            return cut
    return json.dumps(flags)


def _shorten(value: Any) -> Any:
    match value:
        case str():
            return value[:_MAX_CHARACTERS]
        case list():
            return [_shorten(item) for item in value[:_MAX_ITEMS]]
        case dict():
            return {name: _shorten(each) for name, each in value.items()}
        case _:
            return value
