"""Reads the bodies of API requests, and writes answers and errors in the form that
`huggingface_hub` reads."""

import errno
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import IO, Any, TypeVar

from pydantic import BaseModel, ValidationError
from sqlalchemy.exc import OperationalError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ExceptionHandler

from pipeline.hub import unsupported
from pipeline.hub.errors import (
    BadRequest,
    Conflict,
    DiskFull,
    RequestError,
    TooLarge,
    Unauthorized,
)
from serving.http.bodies import BodiesInFlight

_HEADER_CHARACTERS = 4000
"""A longer text is cut in a header, because some clients and proxies refuse an answer with more
than 8 KiB of headers."""
_MAX_REASONS = 10
MAX_BODY_BYTES = 1024 * 1024
_SPOOL_BYTES = 1024 * 1024

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
    }
    if error.code is not None:
        headers["X-Error-Code"] = error.code
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = 'Basic realm="hub"'
    return headers


def _as_header(text: str) -> str:
    """The text as a header: one line of Latin-1 without control characters (RFC 9110, 5.5), cut to
    `_HEADER_CHARACTERS`."""
    line = "".join(character if character.isprintable() else " " for character in text)
    short = " ".join(line.split())[:_HEADER_CHARACTERS]
    return short.encode("latin-1", "replace").decode("latin-1")


def client_warning(topic: str, lines: Sequence[str]) -> dict[str, str]:
    """A header that `huggingface_hub` prints as a warning. No header if there are no `lines`. A
    client's process prints only the first warning of each topic."""
    sentences = (line if line.endswith((".", "!", "?")) else f"{line}." for line in lines)
    return {"X-HF-Warning": f"{topic}; {_as_header(' '.join(sentences))}"} if lines else {}


async def on_request_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return error_response(error)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """The answer if no route has this path or method, or if the bodies of all requests would need
    too much memory. The status is 501 for a feature of the Hugging Face Hub that this hub does not
    have."""
    assert isinstance(error, HTTPException)
    status, path = error.status_code, request.url.path
    message = f"{request.method} {path}: {error.detail}"
    if status in (404, 405):
        if (missing := unsupported.refusal(request.method, path)) is not None:
            return error_response(missing)
        message = f"{request.method} {path} is not supported by this hub."
    headers = {**(error.headers or {}), "X-Error-Message": _as_header(message)}
    return JSONResponse({"error": message}, status_code=status, headers=headers)


def disk_full(error: Exception) -> DiskFull:
    """The error for the client if the disk is full. Raises any other error of a file or the
    database again."""
    is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    if is_full or (isinstance(error, OperationalError) and "is full" in str(error.orig)):
        return DiskFull("The hub's disk is full: make room, and try again.")
    raise error


async def on_failed_disk(_: Request, error: Exception) -> Response:
    return error_response(disk_full(error))


async def on_crash(_: Request, error: Exception) -> Response:
    return JSONResponse(
        {"error": f"The hub failed ({type(error).__name__}); its log says where."},
        status_code=500,
        # Starlette raises the error again, and the server then closes the connection. Without this
        # header, the client would send its next request on the closed connection.
        headers={"Connection": "close"},
    )


EXCEPTION_HANDLERS: Mapping[Any, ExceptionHandler] = {
    RequestError: on_request_error,
    HTTPException: on_http_exception,
    OSError: on_failed_disk,
    OperationalError: on_failed_disk,
    Exception: on_crash,
}


async def read_body(request: Request, *, max_bytes: int = MAX_BODY_BYTES) -> bytes:
    """The complete body. Raises TooLarge. Raises BadRequest if the client disconnects before the
    end, and HTTPException if the bodies of all present requests together have too many bytes."""
    in_flight: BodiesInFlight = request.app.state.bodies
    body = bytearray()
    try:
        with in_flight.body() as count:
            async for chunk in request.stream():
                count(len(chunk))
                body += chunk
                if len(body) > max_bytes:
                    raise TooLarge(
                        f"A request's body may have {max_bytes} bytes at most: send less in one "
                        "request."
                    )
    except ClientDisconnect:
        raise BadRequest("The request's body ended early: send it again.") from None
    return bytes(body)


async def receive_into(file: IO[bytes], request: Request, *, max_bytes: int) -> None:
    """Writes the request's body to `file`, piece by piece: it is never in memory as a whole.

    Raises TooLarge, DiskFull, and BadRequest if the client disconnects before the end.
    """
    size, waiting = 0, bytearray()

    async def write() -> None:
        try:
            await run_in_threadpool(file.write, bytes(waiting))
            # Without `flush`, a small body would stay in the buffer, and git would not read it.
            await run_in_threadpool(file.flush)
        except OSError as error:
            raise DiskFull(
                f"The hub could not store the request ({error.strerror}): make room on the hub's "
                "disk, then send it again."
            ) from error
        waiting.clear()

    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > max_bytes:
                raise TooLarge(
                    f"A request may send {max_bytes} bytes at most: send several commits, or raise "
                    "[hub] max_push_bytes."
                )
            waiting += chunk
            if len(waiting) >= _SPOOL_BYTES:
                await write()
    except ClientDisconnect:
        raise BadRequest("The request's body ended early: send it again.") from None
    await write()


async def read_json(
    request: Request, model: type[Model], *, max_bytes: int = MAX_BODY_BYTES
) -> Model:
    """The body as a `model`; an empty body counts as `{}`. Raises BadRequest, which names the wrong
    fields but not their values: values may be secret."""
    try:
        body = await read_body(request, max_bytes=max_bytes)
        return model.model_validate_json(body or b"{}")
    except ValidationError as error:
        raise BadRequest(f"The request's JSON is wrong: {reasons(error)}.") from None


def reasons(error: ValidationError) -> str:
    """The first wrong fields, each with its reason. Never quotes a value: values may be secret."""
    items = error.errors(include_url=False, include_input=False)
    named = [
        f"{'.'.join(str(part) for part in item['loc']) or 'body'}: {item['msg']}"
        for item in items[:_MAX_REASONS]
    ]
    more = len(items) - len(named)
    return "; ".join([*named, *([f"and {more} more"] if more else [])])


def query_int(request: Request, name: str, default: int, *, at_most: int) -> int:
    """The query parameter `name`, or `default` if it is missing. A larger number than `at_most`
    becomes `at_most`. Raises BadRequest if the parameter is not a whole number."""
    text = request.query_params.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise BadRequest(f"{name}={text!r} is not a whole number: give 0 or more.")
    return min(int(text), at_most)


def query_flag(request: Request, name: str) -> bool:
    return request.query_params.get(name, "").lower() in ("1", "true")


def hub_url(request: Request) -> str:
    """The hub's URL with the host that the client used: the client refuses URLs of other hosts."""
    return str(request.base_url).rstrip("/")


def next_page(request: Request, changes: Mapping[str, object]) -> dict[str, str]:
    return {"Link": f'<{request.url.include_query_params(**changes)}>; rel="next"'}


def iso_time(seconds: float) -> str:
    time = datetime.fromtimestamp(seconds, UTC)
    return f"{time:%Y-%m-%dT%H:%M:%S}.{time.microsecond // 1000:03d}Z"
