"""Says in one line of text what a job is about, what its state or outcome is, and what the user can
do after the gate has rejected a job."""

from collections.abc import Sequence

from jobs.job import Job
from jobs.outcome import JobOutcome
from jobs.store import JobStore

NUM_WATCHED = 100
"""`news` looks at only this many of the newest jobs. This is enough, because an older job has
almost always ended, and the state of an ended job does not change."""
WAYS_ON = (
    "push a correction; or accept the rows as they are with: pipeline jobs run --force --reason WHY"
)
"""What the user can do after the gate has rejected a job."""
DECIDED_NOTHING = frozenset({"failed", "cancelled", "superseded"})
"""Results of jobs after which the rows of an earlier rejected job still wait for the next job."""


class Journal:
    """Finds the jobs whose state has changed since the last call of `news`, or since this object
    was created."""

    def __init__(self, store: JobStore) -> None:
        self._store = store
        self._seen = {job.id: job.state for job in store.list(limit=NUM_WATCHED)}
        self._has_changed = False

    def news(self) -> list[str]:
        """One line for each job whose state has changed. The line of the oldest job comes first.

        Raises StoreError. The next call then returns the lines that this call could not return.
        """
        # The store reports each change only once. Remember the change until `list` has succeeded.
        self._has_changed = self._has_changed or self._store.changed()
        if not self._has_changed:
            return []
        lines = []
        for job in reversed(self._store.list(limit=NUM_WATCHED)):
            if self._seen.get(job.id) != job.state:
                self._seen[job.id] = job.state
                lines.append(describe(job))
        self._has_changed = False
        return lines


def subject(job: Job) -> str:
    """What the job is about. If the job is for a commit, this is the dataset and the commit.
    Otherwise, this is the job's command."""
    revisions = job.spec.revisions
    if revisions is None:
        return " ".join(job.spec.command)
    if revisions.new_sha is None:  # the job gets the head of this ref when it starts
        return f"{revisions.repo}@{revisions.ref.removeprefix('refs/heads/')}"
    return f"{revisions.repo}@{revisions.new_sha[:8]}"


def describe(job: Job) -> str:
    """One line: the job's id, what the job is about, and its state or outcome."""
    if job.outcome is None:
        waits = f", waits: {job.waits_for}" if job.waits_for else ""
        return f"{job.id}  {subject(job)}  {job.state.lower()}{waits}"
    outcome = job.outcome
    counts = "" if outcome.counts is None else str(outcome.counts)
    parts = [job.id, subject(job), outcome.result, outcome.release, counts, outcome.reason]
    return "  ".join(part for part in parts if part)


def advice_after_refusal(jobs: Sequence[Job]) -> str | None:
    """What the user can do if the gate (the checks of the new rows and of the new weights) rejected
    the last job that ended. None if the gate did not reject this job. Jobs that failed, were
    cancelled or were superseded are passed over, because the rejected rows wait after them too.

    jobs: the newest jobs of a pipeline, newest first.
    """
    outcomes = (job.outcome for job in jobs if job.has_ended)
    last = next((each for each in outcomes if _has_decided(each)), None)
    if last is None or last.result != "rejected":
        return None
    revision = (last.dataset_revision or "unknown")[:12]
    return (
        f"the gate rejected {revision}, and the job of the next commit trains on the rows of "
        f"{revision} again; {next_step(jobs, WAYS_ON)}"
    )


def next_step(jobs: Sequence[Job], step: str) -> str:
    """What the user can do after the last job that ended. If no other job runs or waits to run,
    this is `step`. Otherwise, this is a text that tells the user to wait for the other job, because
    the other job may already train on a correction.

    jobs: the newest jobs of a pipeline, newest first.
    """
    current = next((job for job in jobs if not job.has_ended), None)
    if current is None:
        return step
    state = "running" if current.state == "RUNNING" else "pending"
    return f"wait for job {current.id}, which is {state}: pipeline jobs wait {current.id}"


def _has_decided(outcome: JobOutcome | None) -> bool:
    # A job that ended in the stage `claim` only repeats the decision of an earlier job.
    return outcome is None or not (outcome.stage == "claim" or outcome.result in DECIDED_NOTHING)
