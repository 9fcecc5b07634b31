"""`Job`, its states, and `JobRequest`, the input of submitting a job. Each attempt of a job gets a
token and environment variables, which this module makes. The docstring of the package `jobs`
explains terms such as lease, lost and push job.

The job sends its token to the services that `pipeline up` started, to prove which job it is. The
token names its attempt and is signed (HMAC-SHA256) with a key that the services share. The store
does not keep tokens: a token is valid as long as the store says that its attempt runs.

The secret variables of a job are in its spec only in encrypted form (`seal`), with a Fernet key (a
symmetric key of the library `cryptography`) that the hub and the runner share. So nobody can read
them in the database, in `spec.json` or in lists of jobs.
"""

import hashlib
import hmac
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from jobs.errors import JobNotFound, SealBroken
from jobs.folder import PAYLOAD
from jobs.outcome import JobOutcome, OutcomeResult
from jobs.spec import JobSpec

PREFIX = "hpj_"
"""Every attempt token begins with this text, so that a service can distinguish attempt tokens from
other tokens."""

# Limit the digits of the attempt, because `int` raises ValueError for thousands of digits.
_TOKEN = re.compile(rf"{PREFIX}(j\d+)_(\d{{1,9}})_([0-9a-f]{{64}})", re.ASCII)

MAX_INLINE_BYTES = 96 * 1024
"""A payload with more bytes than this is shortened before it is put into a variable, because Linux
refuses to start a process if one of its variables has 128 KiB or more."""

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

JobState = Literal["SCHEDULING", "RUNNING", "COMPLETED", "ERROR", "CANCELED"]

OPEN_STATES: tuple[JobState, ...] = ("SCHEDULING", "RUNNING")
"""The states of jobs that have not ended. A job is pending while its state is SCHEDULING.

Between two attempts, a job stays RUNNING. It must not become pending again: a pending job trains
on the head of its ref, but the head of a job that has started is already chosen.
"""
ENDED_STATES: tuple[JobState, ...] = ("COMPLETED", "ERROR", "CANCELED")


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job as it was when it was read from the store. Times are seconds since the epoch, by the
    store's clock (`JobStore.open`)."""

    id: str
    """`j` and a number, as in `j000012`. A store never gives the same id to two jobs."""
    state: JobState
    spec: JobSpec
    payload: dict[str, Any] | None
    """The payload that a hub would send if somebody pushed the commit that the job is for. Before
    the job has this commit, it is the payload of the last delivery. If a handler of
    the receiver or a person gave one, it is that payload. None if the job has no payload."""
    outcome: JobOutcome | None
    """How the job ended. None while the job has not ended, and for a job whose command exited with
    0 and wrote no outcome."""
    last_failure: JobOutcome | None = None
    """How the last attempt failed. None unless the job waits for its next attempt because an
    attempt was lost or failed for a temporary cause."""
    created_at: float
    run_after: float
    """When a pending job may start. Each delivery may postpone the start. If an
    attempt was lost or failed for a temporary cause, this is when the next attempt may start."""
    started_at: float | None
    """The time from which the job's time limit is counted. At first, this is when a runner took the
    job from the store (`JobStore.claim`). Periods in which the job has no runner, or waits for its
    next attempt, do not count against the limit. So `started_at` is moved later by the length of
    each such period. None if no runner has taken the job yet."""
    ended_at: float | None
    """When the job ended. None while it has not ended."""
    attempt: int
    """Number of the current attempt; 0 while the job is pending."""
    num_lost: int
    """How many attempts were lost or failed for a temporary cause. Attempts that were lost because
    their runner was stopped do not count. When this number reaches `spec.max_attempts`, the job
    fails."""
    owner: str | None
    """Who holds the lease: a text that names the runner, and is different for each attempt. It
    stays here after the lease has run out, until a runner has ended the attempt. None while the job
    is pending or waits for its next attempt, and after it has ended."""
    lease_until: float | None
    """When the lease runs out, unless a heartbeat extends it. If the job waits for its next
    attempt, when the last attempt ended. None while the job is pending. After its end,
    until when somebody handles its outcome (`JobStore.take_outcome`) or needs the job
    (`JobStore.forget`), if anybody does."""
    handle: str | None
    """The agent of the current attempt (`jobs.process.name_of`). None if the agent has
    not begun the attempt yet."""
    cancel_requested: bool
    """Whether somebody asked to cancel the job while it was running."""
    by_hand: bool
    """Whether a person submitted the job. Such a job gets no deliveries. It may be pending at the
    same time as a push job of the same pipeline."""
    waits_for: str | None = None
    """Why a pending job is not started although it may be due: its pipeline is paused, another job
    of the pipeline is running, or the head of its ref cannot be read. Or why a running job does
    nothing now: it waits for its next attempt, or for an agent on an engine. None otherwise."""

    @property
    def identity(self) -> dict[str, Any]:
        """The content of `job.json`, the file that says which job the folder belongs to (`IDENTITY`
        in `jobs/folder.py`)."""
        return {"id": self.id, "created_at": self.created_at}

    @property
    def has_ended(self) -> bool:
        return self.state in ENDED_STATES

    @property
    def needs_head(self) -> bool:
        """Whether the job is for the head of a ref, and this head was not read yet."""
        return self.spec.revisions is not None and self.spec.revisions.new_sha is None


@dataclass(frozen=True, kw_only=True)
class Head:
    """The newest commit of a job's ref."""

    sha: str
    payload: dict[str, Any]
    """The payload that a hub would send for a push of this commit."""


FindHead = Callable[[Job], Head]
"""Reads the head of the job's ref. The job's spec already has the right `old_sha`. Raises HeadAway
or NoHead. It must return within some seconds, because the runner does nothing else meanwhile."""


@dataclass(frozen=True, kw_only=True)
class Delivery:
    source: str
    """Where the delivery came from: a text that contains the id of the webhook. Two deliveries with
    the same source never have the same id. If the receiver submits a job for the delivery, the
    source also contains the name of the pipeline, because one delivery may lead to jobs of several
    pipelines."""
    id: str


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """The arguments of `JobStore.submit` for one submission."""

    spec: JobSpec
    payload: dict[str, Any] | None = None
    delivery: Delivery | None = None
    by_hand: bool = False


def final_state(outcome: JobOutcome | None) -> JobState:
    """The state in which a job ends. An `outcome` of None means that the command exited with 0 and
    wrote no outcome."""
    if outcome is None:
        return "COMPLETED"
    match outcome.result:
        case "failed":
            return "ERROR"
        case "cancelled":
            return "CANCELED"
        case _:
            return "COMPLETED"


def delivery_ids(job: Job) -> tuple[str, ...]:
    """The ids of the deliveries that led to the job, in the order of their arrival."""
    return () if job.spec.revisions is None else job.spec.revisions.delivery_ids


def outcome_of(job: Job, result: OutcomeResult, **values: Any) -> JobOutcome:
    """An outcome with these values, for a job that did not write a valid outcome itself."""
    return JobOutcome(
        result=result,
        delivery_ids=delivery_ids(job),
        job_id=job.id,
        dataset_revision=None if job.spec.revisions is None else job.spec.revisions.new_sha,
        **values,
    )


def log_fields(job: Job) -> dict[str, object]:
    """Fields for structured logs."""
    return {
        "job_id": job.id,
        "pipeline": job.spec.pipeline,
        "delivery_ids": list(delivery_ids(job)),
    }


# What an attempt gets


class _Jobs(Protocol):
    def get(self, job_id: str, /) -> Job: ...


def attempt_token(job: Job, key: bytes) -> str:
    """The token of the job's current attempt, such as `hpj_j000012_1_5f0c…`."""
    return f"{PREFIX}{job.id}_{job.attempt}_{_signature(job.id, job.attempt, key)}"


def job_of_token(token: str, store: _Jobs, key: bytes) -> Job | None:
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
    return running_job(store, job_id, attempt)


def start_ticket(job: Job, key: bytes) -> str:
    """Lets one agent begin the job's current attempt (`jobs/attempt.py`), and nothing else."""
    return _signature(job.id, job.attempt, key, "start ticket")


def is_start_ticket(ticket: str, job: Job, key: bytes) -> bool:
    return hmac.compare_digest(ticket.encode(), start_ticket(job, key).encode())


def running_job(store: _Jobs, job_id: str, attempt: int) -> Job | None:
    """The job, if it is running and this is its current attempt."""
    try:
        job = store.get(job_id)
    except JobNotFound:
        return None
    return job if job.state == "RUNNING" and job.attempt == attempt else None


def _signature(job_id: str, attempt: int, key: bytes, kind: str = "attempt token") -> str:
    message = f"{kind} {job_id} {attempt}".encode()
    return hmac.new(key, message, hashlib.sha256).hexdigest()


def seal(variables: Mapping[str, str], key: bytes) -> str:
    """Encrypt the variables of a job or a webhook. The hub and the runner have the same
    Fernet key, because the copy of a job that a webhook starts gets the variables of the
    webhook."""
    from cryptography.fernet import Fernet  # not above, because an agent elsewhere has no key

    return Fernet(key).encrypt(json.dumps(dict(variables)).encode()).decode()


def unseal(token: str | None, key: bytes | None) -> dict[str, str]:
    """Decrypt the variables; a token of None has none. Raises SealBroken if there is no `key`, or
    if `token` was not encrypted with it."""
    from cryptography.fernet import Fernet, InvalidToken  # as in `seal`

    if token is None:
        return {}
    if key is None:
        raise SealBroken(
            "The job's spec has secrets, but this runner has no key to decrypt them: start the "
            "runner with the key that encrypted them."
        )
    try:
        variables: dict[str, str] = json.loads(Fernet(key).decrypt(token.encode()))
    except InvalidToken:
        raise SealBroken(
            "The secrets were encrypted with another key: set them again, which for a job is to "
            "submit it again, or start the hub and the runner with the old key."
        ) from None
    return variables


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
        **thread_variables(num_threads),
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
    """The payload as valid JSON of at most `max_bytes`. If it is longer, its longest fields are
    left out, and the result has `"truncated": true`."""
    text, names = json.dumps(payload), sorted(payload, key=lambda name: len(str(payload[name])))
    while len(text) > max_bytes:
        names.pop()
        text = json.dumps({**{name: payload[name] for name in names}, "truncated": True})
    return text
