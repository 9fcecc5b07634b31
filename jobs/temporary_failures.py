"""Distinguishes temporary failures, such as a full disk, from lasting failures. After a lasting
failure, a job gets no further attempt."""

import errno

TEMPORARY_FAILURE = 75
"""The command of a pipeline's job exits with this code to report a temporary failure. The code is
`EX_TEMPFAIL` of sysexits.h. A plain command (a job without a pipeline) may use this code for
something else. So if a plain command exits with this code, the failure counts as lasting."""

_TEMPORARY_ERRNOS = frozenset(
    (
        errno.ENOSPC,  # a full disk
        errno.EDQUOT,  # the user's share of the disk is used up
        errno.EAGAIN,  # too many processes
        errno.ENOMEM,
        errno.EMFILE,  # too many open files in this process
        errno.ENFILE,  # too many open files on the machine
    )
)


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
