"""An attempt of a job: how the store begins it, extends its lease and records its end, and what an
end means for the job. The decision about an end uses the exit status of the command, and the files
in the job's folder.

An agent makes three calls (`Calls`): `start`, `beat` and `finish`. On a runner's machine, it makes
them on the store (`AttemptInStore`), elsewhere on a hub (`jobs/attempt_on_hub.py`).
"""

import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from jobs.errors import TEMPORARY_FAILURE, StoreError, is_temporary
from jobs.folder import LOG, OUTCOME, PAYLOAD, SPEC, prepare_job_folder, write_by_rename
from jobs.job import Job, outcome_of
from jobs.outcome import JobOutcome
from jobs.settings import JobsSettings

if TYPE_CHECKING:
    from jobs.store import JobStore

logger = logging.getLogger(__name__)

GIVE_UP_SECONDS = 600.0
"""How long an agent tries to reach the store or the hub. Then a runner ends the attempt."""
_SECONDS_AFTER_ERROR = 1.0
_RETRY_FACTOR = 4
"""After a temporary failure, the next attempt waits for `retry_seconds`. Each earlier attempt that
was lost or failed multiplies this wait by this factor."""

StopReason = Literal["cancel", "timeout", "shutdown"]
"""Why an attempt was stopped. `shutdown`: its runner was stopped."""
_MEMORY_RAN_OUT = (
    " The kernel has killed a process because memory ran out; give the job more memory, or let "
    "fewer programs run beside it."
)

Result = TypeVar("Result")


class Orders(BaseModel):
    """The answer to a heartbeat."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cancel: bool
    seconds_left: float | None
    """Until the time limit of the job; None if it has none."""


@dataclass(frozen=True, kw_only=True)
class Exit:
    """How the command of an attempt ended."""

    code: int | None = None
    """The exit code, negative if a signal ended the command. None if the attempt's agent vanished,
    so that nobody knows the code. With an `error`, the agent may have chosen it."""
    error: str | None = None
    """Why the command could not be started. None if it was started."""
    memory_ran_out: bool = False
    """Whether the kernel has killed a process for want of memory while the command ran."""


@dataclass(frozen=True)
class Lost:
    """The job needs another attempt, because this attempt was interrupted. Either the runner was
    stopped, or the attempt's process vanished or was killed before it had written an outcome."""

    reason: str
    is_shutdown: bool = False
    """Whether the runner was stopped. Such an attempt does not count."""


class Calls(Protocol):
    """All raise LeaseLost if the attempt is not the current one of its job any more, and StoreError
    if the store cannot be reached now."""

    def start(self, handle: str) -> None:
        """`handle` names the agent. A second call with the same one changes nothing."""

    def beat(self) -> Orders: ...

    def finish(self, result: JobOutcome | Lost | None) -> None:
        """Record the result of `outcome_of_exit`."""


def beat(store: "JobStore", job: Job, settings: JobsSettings) -> Orders:
    assert job.owner is not None
    job = store.heartbeat(job.id, job.owner, settings.lease_seconds)
    limit = time_limit(job, settings)
    is_limited = limit is not None and job.started_at is not None
    left = limit - (store.now() - job.started_at) if is_limited else None  # type: ignore[operator]
    return Orders(cancel=job.cancel_requested, seconds_left=left)


def lay_out(job_dir: Path, job: Job) -> None:
    """Prepare the job's folder for an attempt. Raises OSError."""
    prepare_job_folder(job_dir, job.identity)
    (job_dir / OUTCOME).unlink(missing_ok=True)
    write_by_rename(job_dir / SPEC, job.spec.model_dump_json(indent=2))
    if job.payload is not None:
        write_by_rename(job_dir / PAYLOAD, json.dumps(job.payload))


def until_it_works(what: str, call: Callable[[], Result]) -> Result:
    """Call until the store or the hub answers. Raises the last error if it is gone for good, and
    any other error at once. `what` is named in the log."""
    give_up = time.monotonic() + GIVE_UP_SECONDS
    while True:
        try:
            return call()
        except (StoreError, OSError) as error:
            is_lasting = not isinstance(error, StoreError) and not is_temporary(error)
            if is_lasting or time.monotonic() > give_up:
                raise
            logger.error("%s: %s; trying again", what, error)
        time.sleep(_SECONDS_AFTER_ERROR)


@dataclass(kw_only=True)
class AttemptInStore:
    job: Job
    location: str
    """`JobStore.location`."""
    settings: JobsSettings

    def start(self, handle: str) -> None:
        from jobs.store import JobStore  # only here, because an agent elsewhere has no database

        assert self.job.owner is not None
        # Not before: connections do not survive the fork of the agent.
        self._store = JobStore.open(self.location)
        self._store.started(self.job.id, self.job.owner, handle)

    def beat(self) -> Orders:
        return beat(self._store, self.job, self.settings)

    def finish(self, result: JobOutcome | Lost | None) -> None:
        record_result(self._store, self.job, result, self.settings)


# What an end means


def record_result(
    store: "JobStore", job: Job, result: JobOutcome | Lost | None, settings: JobsSettings
) -> Job:
    """Record the end of the job's attempt, as `outcome_of_exit` has decided. Returns the job: it
    has ended, or gets another attempt. Raises LeaseLost and StoreError."""
    assert job.owner is not None
    if isinstance(result, Lost):
        if result.is_shutdown:
            return store.hand_back(job.id, job.owner)
        lost = outcome_of(job, "failed", stage="lost", reason=result.reason)
        return store.retry(job.id, job.owner, lost)
    if result is not None and result.result == "failed" and result.may_pass:
        wait = settings.retry_seconds * _RETRY_FACTOR**job.num_lost
        return store.retry(job.id, job.owner, result, wait)
    return store.finish(job.id, job.owner, result)


def time_limit(job: Job, settings: JobsSettings) -> float | None:
    """How long the job may run, in seconds, all attempts together. None if there is no limit."""
    return job.spec.timeout_seconds or settings.timeout_seconds


def outcome_of_exit(
    job: Job,
    job_dir: Path,
    exit: Exit,
    stop_reason: StopReason | None,
    time_limit: float | None,
) -> JobOutcome | Lost | None:
    """Decide what the end of an attempt means. This function changes nothing. The result is one of
    these:

    - If the command could not be started, an outcome `failed`.
    - The outcome that the job wrote. It counts even if the process was killed after that. There is
      one exception: if the runner stopped the process, and the job wrote `failed` or `cancelled`,
      this outcome is ignored, because the stop probably caused it. The following items then decide.
    - None, if the process exited with 0 and wrote no outcome, and the runner did not stop the
      process. A plain command (a job without a pipeline) that succeeds normally ends in this way.
    - `Lost`, if the runner stopped the process because the runner itself was stopped. Also `Lost`,
      if the process wrote no outcome, and it vanished or somebody other than the runner killed it.
      One exception: if somebody other than the runner killed a plain command, the outcome is
      `failed`.
    - In all other cases, an outcome `failed` or `cancelled` that this function makes. `may_pass` is
      set in this outcome if the command of a pipeline's job exited with `TEMPORARY_FAILURE`, or if
      an attempt could not begin for a temporary cause.

    If `outcome.json` is not valid or cannot be read, the result is an outcome `failed`. But if the
    process was stopped or killed, or has vanished, a file that is not valid counts as missing: the
    process may have been interrupted while it wrote the file. Raises OSError if the file cannot be
    read for a temporary cause, such as too many open files.

    `stop_reason` is None if the attempt was not stopped. `time_limit` is the job's limit in
    seconds.
    """
    code = exit.code
    memory = _MEMORY_RAN_OUT if exit.memory_ran_out else ""
    failed = partial(outcome_of, job, "failed", exit_code=code)
    if exit.error is not None:
        return failed(stage="launch", reason=exit.error, may_pass=code == TEMPORARY_FAILURE)
    try:
        written = _written_outcome(job_dir)
    except ValidationError as error:
        if stop_reason is None and code is not None and code >= 0:
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"])
            where = f", field {field}" if field else ""
            reason = (
                f"{OUTCOME} in the job's folder is not a valid outcome{where}: {first['msg']}. "
                "Correct the command that writes the file, then submit the job again."
            )
            return failed(reason=reason)
        written = None
    except OSError as error:
        if is_temporary(error):
            raise
        reason = (
            f"{OUTCOME} in the job's folder cannot be read: {error.strerror}. Correct the command "
            "that made it, then submit the job again."
        )
        return failed(reason=reason)
    if written is not None and (
        stop_reason is None or written.result not in ("failed", "cancelled")
    ):
        return written
    if stop_reason == "cancel":
        stage = None if written is None else written.stage
        reason = "Cancelled while it was running."
        return outcome_of(job, "cancelled", stage=stage, reason=reason, exit_code=code)
    if stop_reason == "timeout":
        reason = (
            f"The job was stopped at its time limit of {time_limit:g} s. To allow more time, raise "
            "timeout_seconds."
        )
        return failed(stage="timeout", reason=reason)
    if stop_reason == "shutdown":
        return Lost("The job's runner was stopped.", is_shutdown=True)
    if code == 0:
        return None
    if code is None:
        return Lost("The job's process vanished without an exit code and without an outcome.")
    if code < 0 and job.spec.pipeline is not None:
        what = f"Signal {-code} ended the job's process before it wrote an outcome."
        return Lost(f"{what}{memory}")
    if code == TEMPORARY_FAILURE and job.spec.pipeline is not None:
        reason = f"{job.spec.command[0]} failed for a temporary cause{_last_log_line(job_dir)}"
        return failed(reason=reason, may_pass=True)
    how = f"exited with {code}" if code > 0 else f"was ended by signal {-code}"
    reason = f"{job.spec.command[0]} {how}{_last_log_line(job_dir)}{memory}"
    return failed(reason=reason)


def _written_outcome(job_dir: Path) -> JobOutcome | None:
    try:
        return JobOutcome.model_validate_json((job_dir / OUTCOME).read_bytes())
    except FileNotFoundError:
        return None


def _last_log_line(job_dir: Path) -> str:
    """The second half of an error message. It quotes the last line of the job's log, because most
    programs print their error there."""
    try:
        with (job_dir / LOG).open("rb") as log:
            log.seek(max(0, log.seek(0, 2) - 4096))
            lines = log.read().decode(errors="replace").split("\n")
    except OSError:
        return "."
    last = next((line.strip() for line in reversed(lines) if line.strip()), None)
    return "; it wrote nothing." if last is None else f"; the last line of its log: {last[:500]}"
