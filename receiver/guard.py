"""Checks each request to a handler: first the headers, then the size of the body, then the
signature and the event. Only requests that pass all checks reach the handler."""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect

from receiver.errors import BodyTooLarge, ReceiverError
from receiver.handlers import RegisteredWebhook
from receiver.launching import HANDLED
from receiver.senders import NotAPush, read_event
from receiver.settings import ReceiverSettings
from serving.http.requests import BodiesInFlight

_ID_HEADERS = ("webhook-id", "idempotency-key", "x-gitea-delivery", "x-github-delivery")

CallHandler = Callable[[Request], Coroutine[Any, Any, Response]]


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


@dataclass(frozen=True, kw_only=True)
class RequestGuard:
    """The checks in front of one handler.

    The guard sets `request.state.delivery_id` of each request that passes: the sender's id of the
    delivery or, if the sender sends none, the sha256 of the body.
    """

    webhook: RegisteredWebhook
    settings: ReceiverSettings
    bodies: BodiesInFlight
    """Limits the memory that all bodies take together. All handlers share this limit."""
    cache: IdempotencyCache
    """The answers to earlier deliveries. Not used if the handler itself recognises repeats."""

    async def handle(self, request: Request, call_handler: CallHandler) -> Response:
        """The answer to the sender. It is the handler's answer to this delivery or, for a repeated
        delivery, the answer that `cache` has kept. The guard itself answers if the request is
        refused, or if the event is ignored or is only a test."""
        path, proof = self.webhook.path, self.webhook.proof
        sent_id = sent_delivery_id(request.headers)
        with self.bodies.body() as count:
            try:
                # Check the headers before the body is read, so that a stranger cannot fill the
                # memory with bodies.
                check_body = proof.check_headers(request.headers, request.query_params)
                async with asyncio.timeout(self.settings.body_timeout_seconds):
                    body = await self._read(request, count)
                check_body(body)
                event = read_event(proof.scheme, request.headers, body)
            except ReceiverError as refusal:
                return JSONResponse({"error": str(refusal)}, status_code=refusal.status_code)
            except TimeoutError:
                return JSONResponse({"error": "The body did not arrive in time."}, status_code=408)
            except ClientDisconnect:
                return Response(status_code=400)
            if isinstance(event, NotAPush):
                return JSONResponse(event.answer)

            request.state.delivery_id = sent_id or hashlib.sha256(body).hexdigest()
            HANDLED.set((path, request.state.delivery_id))
            proven = _with_body(request, event)
            if sent_id is None or self.webhook.knows_repeats:
                return await call_handler(proven)
            return await self.cache.once((path, sent_id), lambda: call_handler(proven))

    async def _read(self, request: Request, count: Callable[[int], None]) -> bytes:
        limit = self.settings.max_body_bytes
        too_large = BodyTooLarge(f"The body is larger than {limit} bytes.")
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


def guarded_route(guard: RequestGuard) -> type[APIRoute]:
    """A class of FastAPI routes. Before such a route calls its handler, `guard` checks the
    request."""

    class GuardedRoute(APIRoute):
        def get_route_handler(self) -> CallHandler:
            call_handler = super().get_route_handler()

            async def handle(request: Request) -> Response:
                return await guard.handle(request, call_handler)

            return handle

    return GuardedRoute


def sent_delivery_id(headers: Mapping[str, str]) -> str | None:
    """The delivery's id, which the sender has put into a header. None if no header has an id. If a
    sender repeats a delivery, the repeat normally has the same id."""
    return next((headers[name] for name in _ID_HEADERS if headers.get(name)), None)


def _with_body(request: Request, body: bytes) -> Request:
    headers = MutableHeaders(scope={"headers": list(request.scope["headers"])})
    # The sender may have sent a form, or JSON with another content type.
    headers["content-type"] = "application/json"
    proven = Request({**request.scope, "headers": headers.raw}, request.receive)
    proven._body = body  # the guard has already read the sender's body
    return proven
