"""Registered handlers, and the checks of each request to a handler: first the headers, then the
size of the body, then the signature and the event. Only requests that pass all checks reach the
handler."""

import asyncio
import hashlib
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from receiver.errors import ReceiverError
from receiver.payload import WebhookPayload
from receiver.settings import ReceiverSettings
from receiver.verify import Proof, read_event
from serving.http.server import BodiesInFlight

HANDLED: ContextVar[tuple[str, str] | None] = ContextVar("HANDLED", default=None)
"""The delivery for which a handler is called now: the path of the handler, and the delivery's id.
None outside of a handler."""

_ID_HEADERS = ("webhook-id", "idempotency-key", "x-gitea-delivery", "x-github-delivery")

CallHandler = Callable[[Request], Coroutine[Any, Any, Response]]

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


class IdempotencyCache:
    """Remembers the responses to the latest deliveries. If a delivery is repeated, the sender gets
    the remembered response, and the handler is not called again.

    Holds at most `capacity` responses, and drops the oldest responses first. They are only in
    memory. After a restart of the process, a repeated delivery is handled again.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._responses: dict[Hashable, asyncio.Future[Response | None]] = {}

    async def once(self, key: Hashable, call: Callable[[], Awaitable[Response]]) -> Response:
        """The cached response for `key`. If there is none, run `call` and cache its response.

        If an earlier call of `once` with the same key still runs, wait for its response. Streamed
        responses are not cached. Responses with a status of 300 or more are not cached either: the
        delivery failed, so `call` must run again when the sender repeats the delivery.
        """
        while (known := self._responses.get(key)) is not None:
            if (cached := await asyncio.shield(known)) is not None:
                return cached
        pending = self._responses[key] = asyncio.get_running_loop().create_future()
        cached = None
        try:
            response = await call()
            if response.status_code < 300 and hasattr(response, "body"):
                # The background tasks of the response are left out: they run only once.
                cached = Response(response.body, response.status_code)
                cached.raw_headers = response.raw_headers
            return response
        finally:
            pending.set_result(cached)
            if cached is None:
                self._responses.pop(key, None)
            while len(self._responses) > self._capacity:
                del self._responses[next(iter(self._responses))]


def guarded_route(
    webhook: RegisteredWebhook,
    settings: ReceiverSettings,
    bodies: BodiesInFlight,
    cache: IdempotencyCache,
) -> type[APIRoute]:
    """A class of FastAPI routes. Before such a route calls the handler of `webhook`, it checks the
    request.

    It sets `request.state.delivery_id` of each request that passes: the sender's id of the delivery
    or, if the sender sends none, the sha256 of the body.

    Args:
        bodies: Limits the memory that all bodies take together. All handlers share this limit.
        cache: The answers to earlier deliveries. Not used if the handler itself recognises repeats.
    """

    class GuardedRoute(APIRoute):
        def get_route_handler(self) -> CallHandler:
            call_handler = super().get_route_handler()

            async def handle(request: Request) -> Response:
                sent_id = sent_delivery_id(request.headers)
                with bodies.body() as count:
                    try:
                        event = await _read_event(request, sent_id, webhook.proof, settings, count)
                    except ReceiverError as refusal:
                        error = {"error": str(refusal)}
                        return JSONResponse(error, status_code=refusal.status_code)
                    except ClientDisconnect:
                        return Response(status_code=400)
                    if not isinstance(event, bytes):
                        return JSONResponse(event)
                    HANDLED.set((webhook.path, request.state.delivery_id))
                    proven = _with_body(request, event)
                    if sent_id is None or webhook.knows_repeats:
                        return await call_handler(proven)
                    key = webhook.path, sent_id
                    return await cache.once(key, lambda: call_handler(proven))

            return handle

    return GuardedRoute


async def _read_event(
    request: Request,
    sent_id: str | None,
    proof: Proof,
    settings: ReceiverSettings,
    count: Callable[[int], None],
) -> bytes | dict[str, str | bool]:
    """The result of `read_event` for a request that carries the proof."""
    # Check the headers before the body is read, so that a stranger cannot fill the memory with
    # bodies.
    check_body = proof.check_headers(request.headers, request.query_params)
    try:
        async with asyncio.timeout(settings.body_timeout_seconds):
            body = await _read_body(request, settings.max_body_bytes, count)
    except TimeoutError:
        raise HTTPException(408, "The body did not arrive in time.") from None
    check_body(body)
    request.state.delivery_id = sent_id or hashlib.sha256(body).hexdigest()
    return read_event(proof.scheme, request.headers, body)


async def _read_body(request: Request, limit: int, count: Callable[[int], None]) -> bytes:
    too_large = HTTPException(413, f"The body is larger than {limit} bytes.")
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit:
        raise too_large
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        count(len(chunk))
        if len(body) > limit:
            raise too_large
    return bytes(body)


def sent_delivery_id(headers: Mapping[str, str]) -> str | None:
    """The delivery's id, which the sender has put into a header. None if no header has an id. If a
    sender repeats a delivery, the repeat normally has the same id."""
    return next((headers[name] for name in _ID_HEADERS if headers.get(name)), None)


def _with_body(request: Request, body: bytes) -> Request:
    headers = MutableHeaders(scope={"headers": list(request.scope["headers"])})
    # The sender may have sent a form, or JSON with another content type.
    headers["content-type"] = "application/json"
    # `request.state` is in the scope, so both requests have the `delivery_id`.
    proven = Request({**request.scope, "headers": headers.raw}, request.receive)
    proven._body = body  # `_read_body` has already read the sender's body
    return proven


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
