"""The errors that a request can get, in the form that OpenAI's clients read:
`{"error": {"message", "type", "param", "code"}}`."""

import json
import logging
from collections.abc import Mapping
from itertools import islice

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from serving.engine import EngineError, GenerationRefused

logger = logging.getLogger(__name__)

RETRY_AFTER_SECONDS = 1
NO_RETRY = {"X-Should-Retry": "false"}
"""A header for errors that the same request would get again. OpenAI's clients know this header.
Without it, they repeat a request that was answered with 409 or 504."""
MAX_REASONS = 10
"""An error names at most this many faults of a request."""
MAX_READ = 100
"""At most this many faults of a request are read. This is more than `MAX_REASONS`, because several
faults may be equal, or about the same field."""
MAX_SHOWN = 60
"""An error contains the wrong value itself only if the value has at most this many characters. A
prompt, for example, would be too long for an error."""


_JSON_MESSAGES = {
    "dict_type": "Input should be a valid object",
    "list_type": "Input should be a valid array",
    "model_attributes_type": "Input should be a valid object",
}
"""Type of a pydantic error → message in JSON's terms. pydantic's own messages use Python's terms.
"""


class RequestError(HTTPException):
    """Ends a request with an error body. The client gets the message."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, dict(headers or {}))
        self.status = status
        self.body = {"error": {"message": message, "type": type, "param": param, "code": code}}

    def response(self) -> Response:
        """The HTTP response with this error."""
        return JSONResponse(self.body, self.status, self.headers)


class ClientGone(RequestError):
    """The client has disconnected, so nobody reads an answer."""

    def __init__(self) -> None:
        super().__init__(499, "the client disconnected")


def from_validation(error: RequestValidationError) -> RequestError:
    """The error for a request that does not fit its schema. The error names the first `MAX_REASONS`
    faults. Its `param` is the field of the first fault."""
    reasons: dict[str, str | None] = {}
    for each in islice(error.errors(), MAX_READ):
        # `loc` begins with "body". The other parts are fields and numbers of list items, but also
        # names of union members and validators, which mean nothing to a client. Such a name comes
        # right after its field. So use the parts after the field only if the first of them is the
        # number of an item.
        param, *inner = list(map(str, each["loc"][1:])) or [""]
        place = ".".join([param, *inner] if inner and inner[0].isdigit() else [param])
        message = _JSON_MESSAGES.get(each["type"], each["msg"]).removeprefix("Value error, ")
        given = each["input"]
        if _is_short(given):
            message += f", got {json.dumps(given)}"
        reasons.setdefault(f"{place}: {message}" if param else message, param or None)
        if len(reasons) > MAX_REASONS:
            break
    shown = list(reasons)[:MAX_REASONS] + ["…"] * (len(reasons) > MAX_REASONS)
    first = next(iter(reasons.values()), None)
    return RequestError(400, "; ".join(shown), param=first, code="invalid_value")


def _is_short(value: object) -> bool:
    if isinstance(value, str) and len(value) > MAX_SHOWN:
        return False
    return isinstance(value, str | int | float) and len(repr(value)) <= MAX_SHOWN


def model_not_found(model: str | None, pipeline: str) -> RequestError:
    return RequestError(
        404,
        f"model {model!r} is not served here; this server serves {pipeline!r}",
        type="not_found_error",
        param="model",
        code="model_not_found",
    )


def unavailable(message: str) -> RequestError:
    return RequestError(
        503,
        message,
        type="service_unavailable",
        code="unavailable",
        headers={"Retry-After": str(RETRY_AFTER_SECONDS)},
    )


def translated(error: Exception) -> RequestError:
    """The error that the client gets for an exception. Writes an exception of an unexpected type to
    the log, with its traceback."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, GenerationRefused):
        return RequestError(400, f"{error.param}: {error}", param=error.param, code="invalid_value")
    if isinstance(error, EngineError):
        return unavailable(f"the engine failed: {error}; send the request again")
    if isinstance(error, TimeoutError):
        return RequestError(
            504,
            "the answer took longer than this server allows; ask for fewer tokens, or send the "
            "request again later",
            type="timeout_error",
            code="deadline_exceeded",
            headers=NO_RETRY,
        )
    if isinstance(error, RequestValidationError):
        return from_validation(error)
    if isinstance(error, ClientDisconnect):
        return ClientGone()
    if isinstance(error, HTTPException) and error.status_code == 503:
        return unavailable(str(error.detail))
    if isinstance(error, HTTPException):
        codes = {
            400: "invalid_body",
            404: "route_not_found",
            405: "method_not_allowed",
            413: "body_too_large",
        }
        return RequestError(
            error.status_code,
            str(error.detail),
            type="not_found_error" if error.status_code == 404 else "invalid_request_error",
            code=codes.get(error.status_code),
            headers=error.headers,
        )
    logger.error("a request failed with an unexpected error", exc_info=error)
    return RequestError(
        500,
        "an error in the server; the server's log has the details",
        type="server_error",
        code="internal_error",
    )
