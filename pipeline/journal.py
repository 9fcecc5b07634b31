"""Reports each change of a job's state as a line of text, for a person who watches the stack."""

from jobs.job import Job
from jobs.store import JobStore

NUM_WATCHED = 100
"""`news` looks at only this many of the newest jobs. This is enough, because an older job has
almost always ended, and the state of an ended job does not change."""


class Journal:
    """Finds the jobs whose state has changed since the last call of `news`, or since this object
    was created."""

    def __init__(self, store: JobStore) -> None:
        self._store = store
        self._seen = {job.id: job.state for job in store.list(limit=NUM_WATCHED)}

    def news(self) -> list[str]:
        """One line for each job whose state has changed. The line of the oldest job comes first."""
        if not self._store.changed():
            return []
        lines = []
        for job in reversed(self._store.list(limit=NUM_WATCHED)):
            if self._seen.get(job.id) != job.state:
                self._seen[job.id] = job.state
                lines.append(describe(job))
        return lines


def subject(job: Job) -> str:
    """What the job is about. If the job is for a commit, this is the dataset and the commit.
    Otherwise, this is the job's command."""
    revisions = job.spec.revisions
    if revisions is None:
        return " ".join(job.spec.command)
    return f"{revisions.repo}@{revisions.new_sha[:8]}"


def describe(job: Job) -> str:
    """One line: the job's id, what the job is about, and its state or outcome."""
    if job.outcome is None:
        return f"{job.id}  {subject(job)}  {job.state.lower()}"
    outcome = job.outcome
    counts = "" if outcome.counts is None else str(outcome.counts)
    parts = [job.id, subject(job), outcome.result, outcome.release, counts, outcome.reason]
    return "  ".join(part for part in parts if part)
