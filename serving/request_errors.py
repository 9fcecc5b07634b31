"""What a request can do wrong, in the shape that OpenAI's clients read:
`{"error": {"message", "type", "param", "code"}}`."""

import json
from collections.abc import Mapping

from pydantic import ValidationError
from starlette.responses import Response

MAX_SHOWN = 60
"""Characters of a value at fault that are said back; a prompt is longer."""


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
