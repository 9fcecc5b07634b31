"""Distinguishes temporary failures, such as a full disk, from lasting failures. After a lasting
failure, a job gets no further attempt."""

import errno

TEMPORARY_FAILURE = 75
"""The command of a pipeline's job exits with this code to report a temporary failure. The code is
`EX_TEMPFAIL` of sysexits.h. If a plain command exits with this code, the failure counts as lasting,
because the code may mean something else in that program."""

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
    """Whether the error is temporary: no memory, disk space, process or open file was left. This
    function checks the error itself and the errors that led to it."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, MemoryError):
            return True
        if isinstance(cause, OSError) and cause.errno in _TEMPORARY_ERRNOS:
            return True
        cause = cause.__cause__ or cause.__context__
    return False
