"""The environment of a job's process: a pure function that reads no file and no variable."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jobs.folder import PAYLOAD
from jobs.job import Job

MAX_INLINE_BYTES = 96 * 1024
"""Linux refuses to start a process with one variable of 128 KiB or more."""

COMMITTER_DOMAIN = "jobs.hotpush.invalid"
"""The domain of the committer's address in a job. It distinguishes the commits of a job from the
commits of people."""

_THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "RAYON_NUM_THREADS",
)


SHORT_SPINS = {"GOMP_SPINCOUNT": "3000"}
"""How long a thread of PyTorch waits at full speed for the others before it sleeps.

OpenMP's own default is a hundred times that, which is a disaster where another program computes
too: the threads that wait take the cores from the threads that they wait for.
"""


def thread_variables(num_threads: int) -> dict[str, str]:
    """The variables that numeric libraries read when they are loaded."""
    return dict.fromkeys(_THREAD_VARIABLES, str(num_threads))


def job_environment(
    job: Job,
    job_dir: Path,
    runner_env: Mapping[str, str],
    *,
    num_threads: int,
    unsealed: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """All variables of the job's process: the runner's, then the spec's, then the job's own. A
    later variable replaces an earlier one of the same name.

    `unsealed` holds the decrypted `sealed_env` of the spec. Commits that are made in the job name
    the job as the committer.

    A payload adds `WEBHOOK_PAYLOAD` (shortened if the payload is too long for a variable),
    `WEBHOOK_PAYLOAD_FILE` (names a file with the whole payload), `WEBHOOK_REPO_ID`,
    `WEBHOOK_REPO_TYPE` and `WEBHOOK_ID`.
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
    """The payload as JSON of at most `max_bytes`; the result is always valid JSON.

    If the payload is longer, its lists and texts are shortened. The result then has
    `"truncated": true`, and `"updatedFilesTruncated": true` if it lists files.
    """
    whole = json.dumps(payload)
    if len(whole) <= max_bytes:
        return whole
    flags = {"truncated": True}
    if "updatedFiles" in payload:
        flags["updatedFilesTruncated"] = True
    num_items, num_characters = 4096, 16384
    while num_items >= 8:
        cut = json.dumps({**_shorten(payload, num_items, num_characters), **flags})
        if len(cut) <= max_bytes:
            return cut
        num_items, num_characters = num_items // 2, num_characters // 2
    # No hub sends such a payload. Keep the fields that a handler needs to fetch the rest.
    kept = {name: payload[name] for name in ("event", "repo", "webhook") if name in payload}
    cut = json.dumps({**_shorten(kept, 8, 64), **flags})
    return cut if len(cut) <= max_bytes else json.dumps(flags)


def _shorten(value: Any, num_items: int, num_characters: int) -> Any:
    match value:
        case str():
            return value[:num_characters]
        case list():
            return [_shorten(item, num_items, num_characters) for item in value[:num_items]]
        case dict():
            return {name: _shorten(each, num_items, num_characters) for name, each in value.items()}
        case _:
            return value
