"""Tells failures that can pass by themselves from those that cannot. Only the former are worth
another attempt."""

import errno

TEMPORARY_FAILURE = 75
"""The exit code by which a command says that its failure may pass: `EX_TEMPFAIL` of sysexits.h."""

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
    """Whether the error, or an error that caused it, is a lack that can pass."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, MemoryError):
            return True
        if isinstance(cause, OSError) and cause.errno in _PASSING:
            return True
        cause = cause.__cause__ or cause.__context__
    return False
