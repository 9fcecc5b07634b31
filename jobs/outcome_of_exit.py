"""Decides what the end of an attempt means for its job, and records it in the store. The decision
uses the exit status of the command, and the files in the job's folder."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from jobs.errors import TEMPORARY_FAILURE, is_temporary
from jobs.folder import LOG, OUTCOME
from jobs.job import Job, outcome_of
from jobs.outcome import JobOutcome
from jobs.settings import JobsSettings
from jobs.store import JobStore

_RETRY_FACTOR = 4
"""After a temporary failure, the next attempt waits for `retry_seconds`. Each earlier attempt that
was lost or failed multiplies this wait by this factor."""

StopReason = Literal["cancel", "timeout", "shutdown"]
"""Why an attempt was stopped. `shutdown`: its runner was stopped."""


@dataclass(frozen=True, kw_only=True)
class Exit:
    """How the command of an attempt ended."""

    code: int | None = None
    """The exit code, negative if a signal ended the command. None if the attempt's agent vanished,
    so that nobody knows the code."""
    error: str | None = None
    """Why the command could not be started. None if it was started."""


def record_end(
    store: JobStore,
    job: Job,
    job_dir: Path,
    exit: Exit,
    stop_reason: StopReason | None,
    settings: JobsSettings,
) -> Job:
    """Record the end of the job's attempt, by the rules of `outcome_of_exit`. Returns the job: it
    has ended, or gets another attempt. Raises LeaseLost, StoreError, and OSError as
    `outcome_of_exit` does."""
    assert job.owner is not None
    time_limit = job.spec.timeout_seconds or settings.timeout_seconds
    result = outcome_of_exit(job, job_dir, exit, stop_reason, time_limit)
    if isinstance(result, Lost):
        if stop_reason == "shutdown":
            return store.release(job.id, job.owner)
        lost = outcome_of(job, "failed", stage="lost", reason=result.reason)
        return store.retry(job.id, job.owner, lost)
    return record_outcome(store, job, result, settings)


def record_outcome(
    store: JobStore, job: Job, outcome: JobOutcome | None, settings: JobsSettings
) -> Job:
    """Record this outcome of the job's attempt. If the failure may pass, the job normally gets
    another attempt."""
    assert job.owner is not None
    if outcome is not None and outcome.result == "failed" and outcome.may_pass:
        wait = settings.retry_seconds * _RETRY_FACTOR**job.num_lost
        return store.retry(job.id, job.owner, outcome, wait)
    return store.finish(job.id, job.owner, outcome)


@dataclass(frozen=True)
class Lost:
    """The job needs another attempt, because this attempt was interrupted. Either the runner was
    stopped, or the attempt's process vanished or was killed before it had written an outcome."""

    reason: str


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
      set in this outcome if the command of a pipeline's job exited with `TEMPORARY_FAILURE`.

    If `outcome.json` is not valid or cannot be read, the result is an outcome `failed`. But if the
    process was stopped or killed, or has vanished, a file that is not valid counts as missing: the
    process may have been interrupted while it wrote the file. Raises OSError if the file cannot be
    read for a temporary cause, such as too many open files.

    `stop_reason` is None if the attempt was not stopped. `time_limit` is the job's limit in
    seconds.
    """
    code = exit.code
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
        return Lost("The job's runner was stopped.")
    if code == 0:
        return None
    if code is None:
        return Lost("The job's process vanished without an exit code and without an outcome.")
    if code < 0 and job.spec.pipeline is not None:
        return Lost(f"Signal {-code} ended the job's process before it wrote an outcome.")
    if code == TEMPORARY_FAILURE and job.spec.pipeline is not None:
        reason = f"{job.spec.command[0]} failed for a temporary cause{_last_log_line(job_dir)}"
        return failed(reason=reason, may_pass=True)
    how = f"exited with {code}" if code > 0 else f"was ended by signal {-code}"
    reason = f"{job.spec.command[0]} {how}{_last_log_line(job_dir)}"
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
