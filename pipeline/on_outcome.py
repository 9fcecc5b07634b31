"""Reports the outcome of a job. The setting `on_outcome` of the job's pipeline names a URL or a
command. This module posts the outcome as JSON to the URL, or runs the command, which gets the JSON
on its standard input."""

import json
import logging
import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import httpx

from jobs.job import Job
from pipeline.settings import SETTINGS_COPY, PipelineSettings

logger = logging.getLogger(__name__)

TIMEOUT_SECONDS = 30.0
WAITS_SECONDS = (0.0, 1.0, 5.0)
"""The seconds to wait before each attempt to post the outcome to a URL. A command is run only once.
"""


def notify(pipeline: PipelineSettings, job: Job, job_dir: Path) -> bool:
    """Report the job's outcome. Returns True if the URL or the command accepted the outcome.
    Returns False if the report failed, if `on_outcome` is not set, or if the job has no outcome.

    If the report fails, this function logs a warning. It raises no error, because the job has
    already ended.
    """
    if pipeline.on_outcome is None or job.outcome is None:
        return False
    ids = {"pipeline": pipeline.name, "job_id": job.id}
    body = json.dumps({"pipeline": pipeline.name, **job.outcome.model_dump(mode="json")})
    try:
        if isinstance(pipeline.on_outcome, str):
            _post(pipeline.on_outcome, body, job.id)
        else:
            _run(pipeline.on_outcome, body, job, job_dir)
    except Exception as error:
        logger.warning(
            "on_outcome of %s failed for %s: %s", pipeline.name, job.id, error, extra=ids
        )
        return False
    logger.info("on_outcome of %s received the outcome of %s", pipeline.name, job.id, extra=ids)
    return True


def _post(url: str, body: str, job_id: str) -> None:
    headers = {"Content-Type": "application/json", "Webhook-Id": job_id}
    for attempt, wait in enumerate(WAITS_SECONDS, start=1):
        time.sleep(wait)
        try:
            httpx.post(
                url, content=body, headers=headers, timeout=TIMEOUT_SECONDS, trust_env=False
            ).raise_for_status()
        except httpx.HTTPError:
            if attempt == len(WAITS_SECONDS):
                raise
        else:
            return


def _run(command: Sequence[str], body: str, job: Job, job_dir: Path) -> None:
    assert job.outcome is not None
    # Leave out the variable that names the stack's copy of the settings file. Otherwise a
    # `pipeline` command in the user's command would read the copy instead of the settings file.
    of_runner = {name: each for name, each in os.environ.items() if name != SETTINGS_COPY}
    done = subprocess.run(
        command,
        input=body.encode(),
        env={
            **of_runner,
            "JOB_ID": job.id,
            "JOB_DIR": str(job_dir),
            "PIPELINE_OUTCOME": job.outcome.result,
        },
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    if done.returncode != 0:
        words = done.stderr.decode(errors="replace").strip().splitlines()
        raise OSError(
            f"{command[0]} exited with {done.returncode}" + (f": {words[-1]}" if words else "")
        )
