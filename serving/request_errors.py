"""What a request can do wrong, in the shape that OpenAI's clients read:
`{"error": {"message", "type", "param", "code"}}`."""

import json
import logging
from collections.abc import Mapping

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from serving.engine import EngineError

logger = logging.getLogger(__name__)

MAX_SHOWN = 60
"""Characters of a value at fault that are said back; a prompt is longer."""


class ClientGone(Exception):
    """The client hung up; there is nobody to answer."""


class RequestError(Exception):
    """Ends a request with an error body; the message is for who sent it."""

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
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": type, "param": param, "code": code}}
        self.headers = dict(headers or {})

    def response(self) -> Response:
        return Response(
            json.dumps(self.body),
            status_code=self.status,
            headers=self.headers,
            media_type="application/json",
        )


def from_validation(error: ValidationError) -> RequestError:
    """Everything that is wrong with a body; `param` is the first field of it."""
    reasons = []
    params = []
    for each in error.errors(include_url=False):
        # Names of union members and validators stand in `loc` too; the field is its first part.
        param = str(each["loc"][0]) if each["loc"] else None
        message = each["msg"].removeprefix("Value error, ")
        given = each["input"]
        if isinstance(given, str | int | float) and len(repr(given)) <= MAX_SHOWN:
            message += f", got {json.dumps(given)}"
        reason = f"{param}: {message}" if param else message
        if reason not in reasons:
            reasons.append(reason)
            params.append(param)
    return RequestError(400, "; ".join(reasons), param=params[0], code="invalid_value")


def unavailable(message: str, retry_after_seconds: int = 1) -> RequestError:
    return RequestError(
        503,
        message,
        type="service_unavailable",
        code="unavailable",
        headers={"Retry-After": str(retry_after_seconds)},
    )


def translated(error: Exception) -> RequestError:
    """Whatever ended a request, as its client is told. The log has what nobody foresaw."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, EngineError):
        return unavailable(f"the engine failed: {error}; ask again")
    if isinstance(error, TimeoutError):
        return RequestError(
            504,
            "the answer took longer than this server allows; ask for fewer tokens, or later",
            type="timeout_error",
            code="deadline_exceeded",
        )
    if isinstance(error, ClientGone):
        return RequestError(499, "the client hung up")
    if isinstance(error, HTTPException) and error.status_code == 503:
        return unavailable(str(error.detail))
    if isinstance(error, HTTPException):
        code = {404: "route_not_found", 405: "method_not_allowed"}.get(error.status_code)
        return RequestError(
            error.status_code,
            str(error.detail),
            type="not_found_error" if error.status_code == 404 else "invalid_request_error",
            code=code,
            headers=error.headers,
        )
    logger.error("unexpected", exc_info=error)
    return RequestError(
        500, "an error of the server; its log has more", type="server_error", code="internal_error"
    )
