"""What happens to jobs, as lines for a person who watches."""

from jobs.record import Job
from jobs.store import JobStore

NUM_WATCHED = 100
"""Newest jobs that are looked at; more than these do not change between two looks."""


class Journal:
    """Reads the job store for what changed since it was last asked."""

    def __init__(self, store: JobStore) -> None:
        self._store = store
        self._seen = {job.id: job.state for job in store.list(limit=NUM_WATCHED)}

    def news(self) -> list[str]:
        """A line for each job whose state changed, oldest first."""
        if not self._store.changed():
            return []
        lines = []
        for job in reversed(self._store.list(limit=NUM_WATCHED)):
            if self._seen.get(job.id) != job.state:
                self._seen[job.id] = job.state
                lines.append(describe(job))
        return lines


def subject(job: Job) -> str:
    """What the job answers for: the newest commit of a retraining, the command of any other."""
    revisions = job.spec.revisions
    if revisions is None:
        return " ".join(job.spec.command)
    return f"{revisions.repo}@{revisions.new_sha[:8]}"


def describe(job: Job) -> str:
    """One line: the job, what it answers for, and how it stands or ended."""
    if job.outcome is None:
        return f"{job.id}  {subject(job)}  {job.state.lower()}"
    parts = [job.id, subject(job), job.outcome.result, job.outcome.release, job.outcome.reason]
    return "  ".join(part for part in parts if part)
