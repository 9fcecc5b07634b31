"""The record of a registered handler, and the answers that the server sends when it refuses a
request or when a handler fails."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from receiver.payload import WebhookPayload
from receiver.verify import Proof

REFUSALS: dict[int | str, dict[str, Any]] = {
    401: {"description": "The secret or the signature is missing."},
    403: {"description": "The secret or the signature is wrong, or another site has asked."},
    408: {"description": "The body did not arrive in time."},
    413: {"description": "The body is too large."},
    422: {"description": "The body is not an event that the handler takes."},
    503: {"description": "Too many large bodies arrive at once."},
}


@dataclass(frozen=True, kw_only=True)
class RegisteredWebhook:
    """A handler, and the proof that each delivery to the handler must carry."""

    path: str
    handler: Callable[..., Any]
    proof: Proof
    secret_in_shell: str
    """The placeholder for the secret in the shell command that the landing page shows."""
    knows_repeats: bool
    """Whether the handler itself recognises repeated deliveries. If True, the server calls the
    handler for repeated deliveries too."""


def as_secrets(given: str | Sequence[str] | None) -> tuple[str, ...]:
    if not given:
        return ()
    return (given,) if isinstance(given, str) else tuple(given)


def annotate(handler: Callable[..., Any]) -> None:
    """Give a type to each parameter that has none: `Request` if its name is `request`, and
    `WebhookPayload` otherwise. FastAPI would treat a parameter without a type as part of the URL's
    query."""
    parameters = inspect.signature(handler).parameters
    annotations = getattr(handler, "__annotations__", {})
    for name in parameters:
        if name not in annotations:
            annotations[name] = Request if name == "request" else WebhookPayload


async def refuse_unreadable(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    # Do not quote values of the body, because they may be large or secret.
    detail = [
        {"loc": list(entry["loc"]), "msg": entry["msg"], "type": entry["type"]}
        for entry in error.errors()
    ]
    first = detail[0]
    where = ".".join(str(part) for part in first["loc"])
    return JSONResponse(
        {
            "error": f"The body is not a payload that this handler takes: {where}: {first['msg']}",
            "detail": detail,
        },
        status_code=422,
    )


async def refuse(_request: Request, error: Exception) -> JSONResponse:
    """Turn an `HTTPException` into an answer in JSON, because all other errors are answered in JSON
    too. Either the handler raised the exception, or the server refuses the request because of an
    unknown path, a wrong method or too many large bodies."""
    assert isinstance(error, HTTPException)
    return JSONResponse(
        {"error": error.detail}, status_code=error.status_code, headers=error.headers
    )


async def answer_handler_error(_request: Request, _error: Exception) -> JSONResponse:
    return JSONResponse({"error": "The handler failed; the log says why."}, status_code=500)


async def health() -> dict[str, str]:
    return {"status": "ok"}
