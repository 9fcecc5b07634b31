"""The errors of `jobs`.

JobError                   the base class; the message is for a person
├── JobNotFound            no job has this id
├── PendingJob             the pipeline already has a pending job that was submitted by hand
├── LeaseLost              this attempt no longer has the lease, so it must change nothing
├── HeadAway               the head of a job's ref cannot be read now; try again later
├── NoHead                 a job's ref has no head, so there is nothing to train on
├── LaunchError            a command could not be started, or no job can run in the jobs folder
│   └── SealBroken         encrypted variables cannot be decrypted
└── StoreError             the database cannot be used
    └── OtherSchema        another version of hotpush wrote the database

The docstring of the package `jobs` explains terms such as pending and lease. `is_temporary`
distinguishes temporary failures, such as a full disk, from lasting failures. After a lasting
failure, a job gets no further attempt.
"""

import errno

TEMPORARY_FAILURE = 75
"""The command of a pipeline's job exits with this code to report a temporary failure. The code is
`EX_TEMPFAIL` of sysexits.h. A plain command (a job without a pipeline) may use this code for
something else. So if a plain command exits with this code, the failure counts as lasting."""

_TEMPORARY_ERRNOS = {
    errno.ENOSPC,  # a full disk
    errno.EDQUOT,  # the user's share of the disk is used up
    errno.EAGAIN,  # too many processes
    errno.ENOMEM,
    errno.EMFILE,  # too many open files in this process
    errno.ENFILE,  # too many open files on the machine
}


class JobError(Exception):
    """An error about jobs. The message says which job or setting it is about and what is wrong.
    Most messages also say what to do."""


class JobNotFound(JobError):
    def __init__(self, job_id: str) -> None:
        super().__init__(f"There is no job {job_id!r}; `pipeline jobs ls` lists the newest jobs.")


class PendingJob(JobError):
    def __init__(self, job_id: str, pipeline: str | None) -> None:
        super().__init__(
            f"Job {job_id} of {pipeline} was submitted by hand and is still pending. A pipeline "
            f"can have only one pending job by hand. First wait for {job_id} (`pipeline jobs wait "
            f"{job_id}`) or cancel it (`pipeline jobs cancel {job_id}`)."
        )


class LeaseLost(JobError):
    def __init__(self, job_id: str, owner: str) -> None:
        super().__init__(
            f"Job {job_id} is no longer leased to {owner}: another attempt has the job, or the job "
            "has ended."
        )


class HeadAway(JobError):
    """The head of a job's ref cannot be read now, for example because the hub does not answer."""


class NoHead(JobError):
    """The ref of a job has no head: it was deleted, or the dataset is gone or cannot be read."""


class LaunchError(JobError):
    """An attempt could not be started, or the folder that contains all job folders cannot be
    used."""


class SealBroken(LaunchError):
    """The secret variables of a job or of a webhook cannot be decrypted: there is no key, or they
    were encrypted with another one."""


class StoreError(JobError):
    """The database of jobs cannot be read or written."""


class OtherSchema(StoreError):
    """Another version of hotpush wrote the database. Nothing was changed."""


def is_temporary(error: BaseException) -> bool:
    """Whether the error is temporary: memory or disk space was used up, or there were too many
    processes or open files. This function also checks the errors that led to `error`."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, MemoryError):
            return True
        if isinstance(cause, OSError) and cause.errno in _TEMPORARY_ERRNOS:
            return True
        cause = cause.__cause__ or cause.__context__
    return False
