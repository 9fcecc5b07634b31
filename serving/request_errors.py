"""The errors that a request can get, as bodies of the OpenAI API."""

import json
from collections.abc import Mapping

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from serving.engine import EngineError, GenerationRefused

RETRY_AFTER = {"Retry-After": "1"}
_NO_RETRY = {"X-Should-Retry": "false"}
"""A header for errors that the same request would get again. OpenAI's clients know this header.
Without it, they repeat a request that was answered with 409 or 504."""
_STATUSES: dict[int, tuple[str, str | None, dict[str, str]]] = {
    400: ("invalid_request_error", "invalid_body", {}),
    401: ("authentication_error", "invalid_token", {"WWW-Authenticate": "Bearer"}),
    403: ("permission_error", "invalid_token", {}),
    404: ("not_found_error", "route_not_found", {}),
    405: ("invalid_request_error", "method_not_allowed", {}),
    409: ("conflict_error", "release_not_live", _NO_RETRY),
    413: ("invalid_request_error", "body_too_large", {}),
    429: ("rate_limit_error", "queue_full", RETRY_AFTER),
    500: ("server_error", "internal_error", {}),
    503: ("service_unavailable", "unavailable", RETRY_AFTER),
    504: ("timeout_error", "deadline_exceeded", _NO_RETRY),
}
"""Status of an error → its `type`, its `code` if it has no other, and its headers."""
MAX_REASONS = 10
"""An error names at most this many faults of a request."""
MAX_READ = 100
"""At most this many faults of a request are read. This is more than `MAX_REASONS`, because several
faults may be equal, or about the same field."""
MAX_SHOWN = 60
"""An error contains the wrong value itself only if the value has at most this many characters. A
prompt, for example, would be too long for an error."""


class RequestError(HTTPException):
    """Ends a request with an error body. The client gets the message."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str | None = None,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        known = _STATUSES.get(status, ("invalid_request_error", None, {}))
        super().__init__(status, message, {**known[2], **(headers or {})})
        error = {"message": message, "type": type or known[0]}
        self.body = {"error": {**error, "param": param, "code": code or known[1]}}

    def response(self) -> Response:
        """The HTTP response with this error."""
        return JSONResponse(self.body, self.status_code, self.headers)


def invalid(param: str, reason: str, *, code: str = "invalid_value") -> RequestError:
    """The error for a field of the request that is wrong."""
    return RequestError(400, f"{param}: {reason}", param=param, code=code)


def from_validation(error: RequestValidationError) -> RequestError:
    """The error for a request that does not fit its schema. The error names the first `MAX_REASONS`
    faults. Its `param` is the field of the first fault."""
    reasons: dict[str, str | None] = {}
    for each in error.errors()[:MAX_READ]:
        # `loc` begins with "body". The other parts are fields and numbers of list items, but also
        # names of union members and validators, which mean nothing to a client. Such a name comes
        # right after its field. So use the parts after the field only if the first of them is the
        # number of an item.
        param, *inner = list(map(str, each["loc"][1:])) or [""]
        parts = [param, *inner] if inner and inner[0].isdigit() else [param]
        place = ".".join(parts)[:MAX_SHOWN]
        message = each["msg"].removeprefix("Value error, ")
        given = each["input"]
        if isinstance(given, str | int | float) and len(str(given)) <= MAX_SHOWN:
            message += f", got {json.dumps(given)}"
        reasons.setdefault(f"{place}: {message}" if param else message, param or None)
    named = list(reasons)[:MAX_REASONS] + ["…"] * (len(reasons) > MAX_REASONS)
    first = next(iter(reasons.values()), None)
    return RequestError(400, "; ".join(named), param=first, code="invalid_value")


def model_not_found(model: str | None, pipeline: str) -> RequestError:
    message = f"model {model!r} is not served here; this server serves {pipeline!r}"
    return RequestError(404, message, param="model", code="model_not_found")


def translated(error: Exception) -> RequestError:
    """The error that the client gets for an exception."""
    match error:
        case RequestError():
            return error
        case GenerationRefused():
            return invalid(error.param, str(error))
        case EngineError():
            return RequestError(503, f"the engine failed: {error}; send the request again")
        case TimeoutError():
            return RequestError(
                504,
                "the answer took longer than this server allows; ask for fewer tokens, or send "
                "the request again later",
            )
        case RequestValidationError():
            return from_validation(error)
        case HTTPException():
            return RequestError(error.status_code, str(error.detail), headers=error.headers)
    return RequestError(500, "an error in the server; the server's log has the details")
