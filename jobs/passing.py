"""Distinguishes temporary failures, such as a full disk, from lasting failures. A job gets another
attempt only after a temporary failure."""

import errno

TEMPORARY_FAILURE = 75
"""A command exits with this code to report a temporary failure. The code is `EX_TEMPFAIL` of
sysexits.h."""

_PASSING = frozenset(
    (
        errno.ENOSPC,  # a full disk
        errno.EDQUOT,
        errno.EAGAIN,  # too many processes
        errno.ENOMEM,
        errno.EMFILE,  # too many open files
        errno.ENFILE,
    )
)


def can_pass(error: BaseException) -> bool:
    """Whether the error is temporary: the error, or an error that led to it, says that memory, disk
    space, processes or open files ran out."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, MemoryError):
            return True
        if isinstance(cause, OSError) and cause.errno in _PASSING:
            return True
        cause = cause.__cause__ or cause.__context__
    return False
