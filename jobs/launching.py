"""Starts an attempt of a job: writes the spec and the payload into the job's folder, where the
command can read them, and asks the launcher to run the command."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path

from jobs.environment import job_environment
from jobs.errors import LaunchError, SealBroken
from jobs.folder import PAYLOAD, SPEC, prepare_job_folder, write_atomically
from jobs.job import Job, log_fields
from jobs.launcher import Launch, Launcher
from jobs.sealed import unseal
from jobs.spec import JobSpec

logger = logging.getLogger(__name__)


def start_attempt(
    job: Job,
    job_dir: Path,
    launcher: Launcher,
    environment: Mapping[str, str],
    *,
    num_threads: int,
    secret_key: bytes | None,
) -> str:
    """Start the job's current attempt. Returns the handle, which is the launcher's name for the
    attempt.

    `secret_key` decrypts the secrets of the spec; it is None if the runner has no key. Raises
    LaunchError if the attempt cannot be started, OSError if the job's folder cannot be written, and
    DamagedRecord if a record of an earlier attempt is damaged.
    """
    if job.spec.launcher != "local":
        raise LaunchError(
            f"There is no launcher {job.spec.launcher!r}; this runner has only `local`. Submit the "
            "job again with the launcher `local`."
        )
    stale = prepare_job_folder(job_dir, job.identity)
    if stale is not None:
        logger.warning(
            "Folder %s belonged to job %s of another database, so the folder was renamed to %s.",
            job_dir,
            job.id,
            stale.name,
            extra=log_fields(job),
        )
    write_atomically(job_dir / SPEC, job.spec.model_dump_json(indent=2))
    if job.payload is not None:
        write_atomically(job_dir / PAYLOAD, json.dumps(job.payload))
    return launcher.start(
        Launch(
            job_id=job.id,
            attempt=job.attempt,
            command=job.spec.command,
            env=job_environment(
                job,
                job_dir,
                environment,
                num_threads=num_threads,
                unsealed=_unsealed(job.spec, secret_key),
            ),
            job_dir=job_dir,
            niceness=job.spec.resources.niceness,
        )
    )


def _unsealed(spec: JobSpec, secret_key: bytes | None) -> dict[str, str]:
    if spec.sealed_env is None:
        return {}
    if secret_key is None:
        raise SealBroken(
            "The job's spec has secrets, but this runner has no key to decrypt them: start the "
            "runner with the key that encrypted them."
        )
    return unseal(spec.sealed_env, secret_key)
