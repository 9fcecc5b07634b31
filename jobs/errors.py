"""The errors of `jobs`.

JobError                   catch this at a border; the message is for a person
├── JobNotFound            no job has this id
├── PendingJob             the pipeline has a pending job, which this one was not to join
├── LeaseLost              another runner owns the job now: touch nothing of it
├── IllegalMove            the job's state does not allow this
├── LaunchError            a launcher could not start the command
│   └── SealBroken         the secrets of its spec cannot be read
└── StoreError             the database cannot be used
    ├── NewerSchema        it was written by a newer release of this software
    └── OlderSchema        it was written by an older one, and has to be upgraded to be read
"""


class JobError(Exception):
    """Something about jobs went wrong; the message names the value, the cause and what to do."""


class JobNotFound(JobError):
    def __init__(self, job_id: str) -> None:
        super().__init__(f"There is no job {job_id!r}; `pipeline jobs ls` lists those there are.")
        self.job_id = job_id


class PendingJob(JobError):
    def __init__(self, job_id: str, pipeline: str | None) -> None:
        super().__init__(
            f"Job {job_id} of {pipeline} is pending, and one at a time can be. Wait for it "
            f"(`pipeline jobs wait {job_id}`) or cancel it (`pipeline jobs cancel {job_id}`) first."
        )
        self.job_id = job_id


class LeaseLost(JobError):
    def __init__(self, job_id: str, owner: str) -> None:
        super().__init__(
            f"Job {job_id} is no longer leased to runner {owner}: another runner took it, or it "
            "has ended. This runner leaves it alone."
        )
        self.job_id = job_id


class IllegalMove(JobError):
    def __init__(self, job_id: str, state: str, wanted: str) -> None:
        super().__init__(f"Job {job_id} is {state} and cannot become {wanted}.")


class LaunchError(JobError):
    """A command could not be started."""


class SealBroken(LaunchError):
    """The encrypted variables of a spec are under another key than the runner's."""


class StoreError(JobError):
    """The database of jobs cannot be read or written."""


class NewerSchema(StoreError):
    """The database has a schema that this release does not know; it was not touched."""


class OlderSchema(StoreError):
    """Only whoever runs jobs upgrades the database; it was not touched."""
