"""Decides the outcome of a job after its process has ended. The decision uses the exit status of
the process, and the files in the job's folder."""

from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from jobs.folder import LOG, OUTCOME
from jobs.job import Job, delivery_ids, failure
from jobs.launcher import Status
from jobs.outcome import JobOutcome
from jobs.temporary_failures import TEMPORARY_FAILURE, is_temporary


@dataclass(frozen=True)
class Lost:
    """The job needs another attempt, because this attempt was interrupted. Either the runner was
    stopped, or the attempt's process vanished or was killed before it had written an outcome."""

    reason: str


def outcome_of_exit(
    job: Job,
    job_dir: Path,
    status: Status,
    *,
    stop_reason: str | None,
    time_limit: float | None,
) -> JobOutcome | Lost | None:
    """Decide what the end of a job's process means. The process has exited, or has vanished without
    an exit code. This function changes no file. The result is one of these:

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

    `stop_reason` says why the runner stopped the process: `cancel`, `timeout` or `shutdown`. None
    means that the runner did not stop the process. `time_limit` is the job's limit in seconds.
    """
    try:
        written = _written_outcome(job_dir)
    except ValidationError as error:
        if stop_reason is None and status.exit_code is not None and status.exit_code >= 0:
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"])
            where = f", field {field}" if field else ""
            reason = (
                f"{OUTCOME} in the job's folder is not a valid outcome{where}: {first['msg']}. "
                "Correct the command that writes the file, then submit the job again."
            )
            return failure(job, stage="launch", reason=reason, exit_code=status.exit_code)
        written = None
    except OSError as error:
        if is_temporary(error):
            raise
        reason = (
            f"{OUTCOME} in the job's folder cannot be read: {error.strerror}. Correct the command "
            "that made it, then submit the job again."
        )
        return failure(job, stage="launch", reason=reason, exit_code=status.exit_code)
    if written is not None and (
        stop_reason is None or written.result not in ("failed", "cancelled")
    ):
        return written
    if stop_reason == "cancel":
        return JobOutcome(
            result="cancelled",
            stage=None if written is None else written.stage,
            reason="Cancelled while it was running.",
            exit_code=status.exit_code,
            delivery_ids=delivery_ids(job),
            job_id=job.id,
        )
    if stop_reason == "timeout":
        reason = (
            f"The job was stopped at its time limit of {time_limit:g} s. To allow more time, raise "
            "timeout_seconds."
        )
        return failure(job, stage="timeout", reason=reason, exit_code=status.exit_code)
    if stop_reason == "shutdown":
        return Lost("The job's runner was stopped.")
    code = status.exit_code
    if code == 0:
        return None
    if code is None:
        return Lost("The job's process vanished without an exit code and without an outcome.")
    if code < 0 and job.spec.pipeline is not None:
        return Lost(f"Signal {-code} ended the job's process before it wrote an outcome.")
    if status.error is not None:
        return failure(job, stage="launch", reason=status.error, exit_code=code)
    if code == TEMPORARY_FAILURE and job.spec.pipeline is not None:
        reason = f"{job.spec.command[0]} failed for a temporary cause{_last_log_line(job_dir)}"
        failed = failure(job, stage=None, reason=reason, exit_code=code)
        return failed.model_copy(update={"may_pass": True})
    how = f"exited with {code}" if code > 0 else f"was ended by signal {-code}"
    reason = f"{job.spec.command[0]} {how}{_last_log_line(job_dir)}"
    return failure(job, stage=None, reason=reason, exit_code=code)


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
    except FileNotFoundError:
        return "."
    last = next((line.strip() for line in reversed(lines) if line.strip()), None)
    return "; it wrote nothing." if last is None else f"; the last line of its log: {last[:500]}"
