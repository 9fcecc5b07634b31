"""Makes and checks the tokens of job attempts. Each attempt of a job has its own token. The job
sends this token to the services that `pipeline up` started, to prove which job it is.

A token names its attempt and is signed (HMAC-SHA256) with a key that the services share. The store
does not keep tokens: a token is valid as long as the store says that its attempt runs.
"""

import hashlib
import hmac
import re

from jobs.errors import JobNotFound
from jobs.job import Job
from jobs.store import JobStore

PREFIX = "hpj_"
"""Every attempt token begins with this text, so that a service can distinguish attempt tokens from
other tokens."""

# Limit the digits of the attempt, because `int` raises ValueError for thousands of digits.
_TOKEN = re.compile(rf"{PREFIX}(j\d+)_(\d{{1,9}})_([0-9a-f]{{64}})", re.ASCII)


def attempt_token(job: Job, key: bytes) -> str:
    """The token of the job's current attempt, such as `hpj_j000012_1_5f0c…`."""
    return f"{PREFIX}{job.id}_{job.attempt}_{_signature(job.id, job.attempt, key)}"


def job_of_token(token: str, store: JobStore, key: bytes) -> Job | None:
    """The running job whose current attempt has this token. None if the token is wrong, if it
    belongs to an earlier attempt, or if the job has ended.

    A process of an earlier attempt may still be alive, but the token of this process is no longer
    valid.
    """
    match = _TOKEN.fullmatch(token)
    if match is None:
        return None
    job_id, attempt = match[1], int(match[2])
    if not hmac.compare_digest(match[3], _signature(job_id, attempt, key)):
        return None
    try:
        job = store.get(job_id)
    except JobNotFound:
        return None
    return job if job.state == "RUNNING" and job.attempt == attempt else None


def _signature(job_id: str, attempt: int, key: bytes) -> str:
    message = f"attempt token {job_id} {attempt}".encode()
    return hmac.new(key, message, hashlib.sha256).hexdigest()
