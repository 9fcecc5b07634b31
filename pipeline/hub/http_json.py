"""How the API reads a body and answers: JSON, and errors in the one shape that the client knows."""

import secrets
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ExceptionHandler

from pipeline.hub.errors import BadRequest, Conflict, RequestError, TooLarge, Unauthorized

MAX_BODY_BYTES = 1024 * 1024

Model = TypeVar("Model", bound=BaseModel)


def error_response(error: RequestError) -> Response:
    body = {"error": str(error)}
    if isinstance(error, Conflict) and error.url is not None:
        body["url"] = error.url
    return JSONResponse(body, status_code=error.status, headers=error_headers(error))


def error_headers(error: RequestError) -> dict[str, str]:
    headers = {
        **error.headers,
        "X-Error-Message": _as_header(str(error)),
        "X-Request-Id": secrets.token_hex(8),
    }
    if error.code is not None:
        headers["X-Error-Code"] = error.code
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = 'Basic realm="hub"'
    return headers


def _as_header(text: str) -> str:
    """One line of Latin-1 without control characters (RFC 9110, 5.5)."""
    line = "".join(character if character.isprintable() else " " for character in text)
    return " ".join(line.split()).encode("latin-1", "replace").decode("latin-1")


async def on_request_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return error_response(error)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """What is refused before a route sees it: no such route, no such method, too many bodies."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    if error.status_code in (404, 405):
        message += ". This hub has no such route."
    return JSONResponse(
        {"error": message},
        status_code=error.status_code,
        headers={**(error.headers or {}), "X-Request-Id": secrets.token_hex(8)},
    )


async def on_crash(_: Request, error: Exception) -> Response:
    return JSONResponse(
        {"error": f"The hub failed ({type(error).__name__}); its log says where."},
        status_code=500,
        headers={"X-Request-Id": secrets.token_hex(8)},
    )


EXCEPTION_HANDLERS: Mapping[Any, ExceptionHandler] = {
    RequestError: on_request_error,
    HTTPException: on_http_exception,
    Exception: on_crash,
}


async def read_body(request: Request) -> bytes:
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_BODY_BYTES:
                raise TooLarge(f"A request's body may have {MAX_BODY_BYTES} bytes at most.")
    except ClientDisconnect:
        raise BadRequest("The request's body ended early.") from None
    return bytes(body)


async def read_json(request: Request, model: type[Model]) -> Model:
    """Raises BadRequest that names each wrong field; quotes none: values may be secret."""
    try:
        return model.model_validate_json(await read_body(request) or b"{}")
    except ValidationError as error:
        reasons = "; ".join(
            f"{'.'.join(str(part) for part in item['loc']) or 'body'}: {item['msg']}"
            for item in error.errors(include_url=False, include_input=False)
        )
        raise BadRequest(f"The request's JSON is not as it should be: {reasons}.") from None


def query_int(request: Request, name: str, default: int, *, at_most: int) -> int:
    text = request.query_params.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise BadRequest(f"{name}={text!r} is not a whole number from 0 on.")
    return min(int(text), at_most)


def hub_url(request: Request) -> str:
    """As the client calls it: the client refuses URLs of any other host."""
    return str(request.base_url).rstrip("/")


def next_page(request: Request, changes: Mapping[str, object]) -> dict[str, str]:
    return {"Link": f'<{request.url.include_query_params(**changes)}>; rel="next"'}


def iso_time(seconds: float) -> str:
    time = datetime.fromtimestamp(seconds, UTC)
    return f"{time:%Y-%m-%dT%H:%M:%S}.{time.microsecond // 1000:03d}Z"
