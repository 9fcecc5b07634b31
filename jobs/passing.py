"""Distinguishes temporary failures, such as a full disk, from lasting failures. Only a temporary
failure is worth another attempt."""

import errno

TEMPORARY_FAILURE = 75
"""With this exit code, a command says that its failure is temporary: `EX_TEMPFAIL` of sysexits.h.
"""

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
    """Whether the error is temporary: the error, or an error that caused it, says that memory, disk
    space, processes or open files ran out."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, MemoryError):
            return True
        if isinstance(cause, OSError) and cause.errno in _PASSING:
            return True
        cause = cause.__cause__ or cause.__context__
    return False
