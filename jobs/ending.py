"""How a job ended, from what its process left: pure judgement over its folder's files."""

from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from jobs.folder import LOG, OUTCOME
from jobs.launcher import Status
from jobs.outcome import JobOutcome
from jobs.record import Job, delivery_ids, failure


@dataclass(frozen=True)
class Lost:
    """It ended without an outcome, through no fault that it could have told of: try again."""

    reason: str


def ending(
    job: Job,
    job_dir: Path,
    status: Status,
    *,
    stopping: str | None,
    time_limit: float | None,
) -> JobOutcome | Lost | None:
    """The outcome of a job whose process has exited or vanished; None for exit code 0 alone.

    `stopping` is why the runner stopped it: `cancel`, `timeout` or `shutdown`. A job that wrote
    its outcome is final, also when the process was killed right after. What a job writes about
    being stopped gives way to what the runner knows about it.
    """
    try:
        written = _written(job_dir)
    except ValidationError as error:
        first = error.errors()[0]
        reason = f"{OUTCOME} is not an outcome: {first['msg']} at {first['loc']}."
        return failure(job, stage="launch", reason=reason, exit_code=status.exit_code)
    if written is not None and (stopping is None or written.result not in ("failed", "cancelled")):
        return written
    if stopping == "cancel":
        return JobOutcome(
            result="cancelled",
            stage=None if written is None else written.stage,
            reason="Cancelled while it was running.",
            exit_code=status.exit_code,
            delivery_ids=delivery_ids(job),
            job_id=job.id,
        )
    if stopping == "timeout":
        reason = f"It ran into its limit of {time_limit:g} s; raise timeout_seconds to allow more."
        return failure(job, stage="timeout", reason=reason, exit_code=status.exit_code)
    if stopping == "shutdown":
        if written is not None:
            # It calls itself cancelled, and nobody cancelled it: it goes on at the next start.
            (job_dir / OUTCOME).unlink()
        return Lost("Its runner was stopped.")
    code = status.exit_code
    if code == 0:
        return None
    if code is None:
        return Lost("Its process vanished without an outcome.")
    if code < 0 and job.spec.pipeline is not None:
        return Lost(f"Its process was ended by signal {-code} without an outcome.")
    if status.error is not None:
        return failure(job, stage="launch", reason=status.error, exit_code=code)
    how = f"exited with {code}" if code > 0 else f"was ended by signal {-code}"
    reason = f"{job.spec.command[0]} {how}{_last_words(job_dir)}"
    return failure(job, stage=None, reason=reason, exit_code=code)


def _written(job_dir: Path) -> JobOutcome | None:
    try:
        return JobOutcome.model_validate_json((job_dir / OUTCOME).read_bytes())
    except FileNotFoundError:
        return None


def _last_words(job_dir: Path) -> str:
    """The last line of the log, as most programs end in what went wrong."""
    try:
        with (job_dir / LOG).open("rb") as log:
            log.seek(max(0, log.seek(0, 2) - 4096))
            lines = log.read().decode(errors="replace").split("\n")
    except FileNotFoundError:
        return "."
    last = next((line.strip() for line in reversed(lines) if line.strip()), None)
    return "; it wrote nothing." if last is None else f"; the last line of its log: {last[:500]}"
