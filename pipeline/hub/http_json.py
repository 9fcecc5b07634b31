"""Reads the bodies of requests, and writes answers and errors in the form that `huggingface_hub`,
git and git-lfs read."""

import errno
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from fastapi import Depends
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from sqlalchemy.exc import DataError, OperationalError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response

from jobs.errors import JobNotFound, LeaseLost, StoreError
from pipeline.hub.errors import (
    BadRequest,
    Conflict,
    DiskFull,
    NotFound,
    RequestError,
    TooLarge,
    Unavailable,
)
from serving.http.server import BodiesInFlight

logger = logging.getLogger(__name__)

_HEADER_CHARACTERS = 4000
"""A longer text is cut in a header, because some clients and proxies refuse an answer with more
than 8 KiB of headers."""
_MAX_REASONS = 10
MAX_BODY_BYTES = 1024 * 1024
_CHUNK_BYTES = 1024 * 1024
GIT_SERVICES = ("git-upload-pack", "git-receive-pack")

Json = dict[str, object]
Model = TypeVar("Model", bound=BaseModel)


async def on_request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    text, path, status = str(error), request.url.path, error.status
    is_lfs = "/info/lfs/" in path
    if is_lfs and status == 401 and "authorization" in request.headers:
        # After 401, `git lfs` asks its credential helper for a token again. A helper that has only
        # the wrong token would give it again and again, without end. So a wrong token gets 403.
        status = 403
    headers = {**error.headers, "X-Error-Message": _as_header(text)}
    if error.code is not None:
        headers["X-Error-Code"] = error.code
    if status == 401:
        headers["WWW-Authenticate"] = 'Basic realm="hub"'
    if path.endswith(("/info/refs", *GIT_SERVICES)):  # git prints each line after "remote: "
        return PlainTextResponse(f"{text}\n", status, headers)
    body = {"error": text}
    if isinstance(error, Conflict) and error.path is not None:
        body["url"] = f"{hub_url(request)}/{error.path}"
    if is_lfs:
        body["message"] = text
    return JSONResponse(body, status, headers)


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


async def _on_wrong_query(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    wrong = BadRequest(f"The request's URL is wrong: {reasons(error)}.")
    return await on_request_error(request, wrong)


async def _on_job_error(request: Request, error: Exception) -> Response:
    kind = NotFound if isinstance(error, JobNotFound) else Conflict
    return await on_request_error(request, kind(str(error)))


async def _on_wrong_text(request: Request, _: Exception) -> Response:
    # SQLite stores every text.
    wrong = BadRequest("A text of this request has a NUL character, or is too long: correct it.")
    return await on_request_error(request, wrong)


async def _on_failed_storage(request: Request, error: Exception) -> Response:
    """The answer if the disk is full, or the database is away. Raises any other error again."""
    is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    if is_full or (isinstance(error, OperationalError) and "is full" in str(error.orig)):
        full = DiskFull("The hub's disk is full: make room, and try again.")
        return await on_request_error(request, full)
    if isinstance(error, (OperationalError, StoreError)):
        logger.error("The database failed: %s", str(error).partition("\n")[0])
        away = Unavailable("The hub cannot use its database now: try again.")
        return await on_request_error(request, away)
    raise error


async def _on_crash(_: Request, error: Exception) -> Response:
    return JSONResponse(
        {"error": f"The hub failed ({type(error).__name__}); its log says where."},
        status_code=500,
        # Starlette raises the error again, and the server then closes the connection. Without this
        # header, the client would send its next request on the closed connection.
        headers={"Connection": "close"},
    )


EXCEPTION_HANDLERS: dict[Any, Any] = {
    RequestError: on_request_error,
    RequestValidationError: _on_wrong_query,
    JobNotFound: _on_job_error,
    LeaseLost: _on_job_error,
    DataError: _on_wrong_text,
    OSError: _on_failed_storage,
    OperationalError: _on_failed_storage,
    StoreError: _on_failed_storage,
    Exception: _on_crash,
}


async def pieces(request: Request, *, max_bytes: int | None = None) -> AsyncGenerator[bytes, None]:
    """The pieces of the body. Raises TooLarge, and BadRequest if the client disconnects before the
    end."""
    size = 0
    try:
        async for piece in request.stream():
            size += len(piece)
            if max_bytes is not None and size > max_bytes:
                raise TooLarge(
                    f"This request may send {max_bytes} bytes at most: send less at once. For a "
                    "push or a commit, [hub] max_push_bytes is the limit."
                )
            yield piece
    except ClientDisconnect:
        raise BadRequest("The request's body ended early: send it again.") from None


async def read_body(request: Request, *, max_bytes: int = MAX_BODY_BYTES) -> bytes:
    """The complete body. Raises the errors of `pieces`, and HTTPException if the bodies of all
    present requests together have too many bytes."""
    in_flight: BodiesInFlight = request.app.state.bodies
    body = bytearray()
    with in_flight.body() as count:
        async for piece in pieces(request, max_bytes=max_bytes):
            count(len(piece))
            body += piece
    return bytes(body)


async def chunks(request: Request, *, max_bytes: int | None = None) -> AsyncIterator[bytes]:
    """The body in pieces of at least `_CHUNK_BYTES` bytes each, except the last: for a caller that
    writes each in a thread, which would be slow with small pieces. Raises the errors of `pieces`.
    """
    waiting = bytearray()
    async for piece in pieces(request, max_bytes=max_bytes):
        waiting += piece
        if len(waiting) >= _CHUNK_BYTES:
            yield bytes(waiting)
            waiting.clear()
    if waiting:
        yield bytes(waiting)


def json_body(model: type[Model], *, max_bytes: int = MAX_BODY_BYTES) -> Any:
    """A dependency: the request's body as a `model`; an empty body counts as `{}`. Unlike a body
    that FastAPI reads, it is read only after the dependencies before it, which check the token.

    Raises BadRequest, which names the wrong fields but not their values: values may be secret."""

    async def read(request: Request) -> Model:
        body = await read_body(request, max_bytes=max_bytes)
        try:
            return model.model_validate_json(body or b"{}")
        except ValidationError as error:
            raise BadRequest(f"The request's JSON is wrong: {reasons(error)}.") from None

    return Depends(read)


def reasons(error: ValidationError | RequestValidationError) -> str:
    """The first wrong fields, each with its reason. Never quotes a value: values may be secret."""
    items = error.errors()
    named = [
        f"{'.'.join(str(part) for part in item['loc']) or 'body'}: {item['msg']}"
        for item in items[:_MAX_REASONS]
    ]
    more = len(items) - len(named)
    return "; ".join([*named, *([f"and {more} more"] if more else [])])


def hub_url(request: Request) -> str:
    """The hub's URL with the host that the client used: the client refuses URLs of other hosts."""
    return str(request.base_url).rstrip("/")


def iso_time(seconds: float) -> str:
    time = datetime.fromtimestamp(seconds, UTC)
    return f"{time:%Y-%m-%dT%H:%M:%S}.{time.microsecond // 1000:03d}Z"


def file_answer(path: Path, oid: str, headers: Mapping[str, str] | None = None) -> FileResponse:
    """The answer with a file, or the part of it that `Range` asks for. Only one piece of it is in
    memory at a time."""
    headers = {"ETag": f'"{oid}"', "X-Content-Type-Options": "nosniff", **(headers or {})}
    answer = FileResponse(path, headers=headers, media_type="application/octet-stream")
    answer.chunk_size = _CHUNK_BYTES  # twice as fast as starlette's 64 KiB
    return answer
