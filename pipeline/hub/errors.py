"""The hub's errors, and the HTTP status and code with which each is answered.

    HubError                     the hub cannot start or go on; shown at the terminal
    └── RequestError             becomes the answer to a request, never a traceback
        ├── BadRequest           400
        ├── Unauthorized         401
        ├── Forbidden            403
        ├── RepositoryNotFound   404, code RepoNotFound
        ├── RevisionNotFound     404, code RevisionNotFound
        ├── EntryNotFound        404, code EntryNotFound, with the sha of the commit
        ├── NotFound             404, without a code: anything else that does not exist
        ├── Conflict             409
        ├── PreconditionFailed   412
        ├── TooLarge             413
        ├── NotSupported         501
        ├── Unavailable          503
        └── DiskFull             507

The codes are those that `huggingface_hub.utils.hf_raise_for_status` turns into exceptions.
"""

from collections.abc import Mapping

from pipeline.errors import PipelineError


class HubError(PipelineError):
    """The hub cannot start or go on; the message is for the person at the terminal."""


class RequestError(HubError):
    """A request that is answered with an error; the message is for the client's user."""

    status = 500
    code: str | None = None

    def __init__(self, message: str, *, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.headers = dict(headers or {})


class BadRequest(RequestError):
    status = 400


class Unauthorized(RequestError):
    status = 401


class Forbidden(RequestError):
    status = 403


class RepositoryNotFound(RequestError):
    status = 404
    code = "RepoNotFound"


class RevisionNotFound(RequestError):
    status = 404
    code = "RevisionNotFound"


class EntryNotFound(RequestError):
    status = 404
    code = "EntryNotFound"

    def __init__(self, message: str, *, commit: str) -> None:
        # With this header, the client can remember that the file does not exist in this commit.
        super().__init__(message, headers={"X-Repo-Commit": commit})


class NotFound(RequestError):
    """A route, a webhook, a token, a discussion or the content of a large file. It has no code,
    because a large file may still come, so no client may remember that it does not exist."""

    status = 404


class Conflict(RequestError):
    """Something of this name exists already, or it was changed meanwhile. If it is a repository
    that exists already, `path` leads to it: the client needs the address for `exist_ok`. Else
    `path` is None."""

    status = 409

    def __init__(self, message: str, *, path: str | None = None) -> None:
        super().__init__(message)
        self.path = path


class PreconditionFailed(RequestError):
    status = 412


class TooLarge(RequestError):
    status = 413


class NotSupported(RequestError):
    status = 501


class Unavailable(RequestError):
    status = 503


class DiskFull(RequestError):
    status = 507
