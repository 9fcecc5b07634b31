"""The exceptions that jobs and the command line get from the package `serving`. Those of engines
are in `serving/engine.py`, and those of requests in `serving/request_errors.py`.

ServingError                the command line prints its message in one line
├── ReleaseError            a release folder has faults; `reasons` lists all of them
│   └── NotEnoughSpace      the disk has no space for another release
├── Superseded              another release was chosen meanwhile
└── SwapAnswerError         the answer to a swap request is not from a server of hotpush
"""

import errno

_TEMPORARY_ERRNOS = {
    errno.ENOSPC,  # a full disk
    errno.EDQUOT,  # the user's share of the disk is used up
    errno.EAGAIN,  # too many processes
    errno.ENOMEM,
    errno.EMFILE,  # too many open files in this process
    errno.ENFILE,  # too many open files on the machine
}


class ServingError(Exception):
    """Serving or publishing is not possible. The message is for the person at the terminal."""


class ReleaseError(ServingError):
    """A release or checkpoint folder cannot be published, read or served."""

    def __init__(self, *reasons: str) -> None:
        super().__init__("; ".join(reasons))
        self.reasons = reasons
        """Each reason names the file, and the tensor if the fault is in a tensor."""


class NotEnoughSpace(ReleaseError):
    """The disk has no space for another release. The unfinished release was removed."""


class Superseded(ServingError):
    """A release was made to follow another one than the release that is chosen now."""

    def __init__(self, release_id: str, chosen: str | None) -> None:
        super().__init__(f"{chosen or 'no release'} was chosen meanwhile, so {release_id} is not")
        self.chosen = chosen


class SwapAnswerError(ServingError):
    """The answer to a swap request is not a `SwapResult`."""


def is_temporary(error: BaseException) -> bool:
    """Whether the error says nothing about the files of a release: disk space or memory was used
    up, or there were too many processes or open files. This function also checks the errors that
    led to `error`."""
    cause: BaseException | None = error
    while cause is not None:
        is_used_up = isinstance(cause, OSError) and cause.errno in _TEMPORARY_ERRNOS
        if is_used_up or isinstance(cause, NotEnoughSpace | MemoryError):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def first_line(error: BaseException) -> str:
    """The first line of the error's message, shortened; the type of the error if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
