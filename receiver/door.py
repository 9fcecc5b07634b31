"""The door of one handler: size, then proof, then event. Only what passed reaches the handler."""

import asyncio
import hashlib
import json
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive

from receiver.answers import Answers
from receiver.durable import DurableDeliveries
from receiver.errors import BodyTooLarge, NotWorking, ReceiverError
from receiver.history import History, Received
from receiver.payload import WebhookPayload
from receiver.senders import NotAPush, read_event
from receiver.verify import Proof, is_svix

_logger = logging.getLogger(__name__)

_ID_HEADERS = ("webhook-id", "svix-id", "idempotency-key", "x-gitea-delivery", "x-github-delivery")

Inner = Callable[[Request], Coroutine[Any, Any, Response]]


@dataclass(frozen=True, kw_only=True)
class Door:
    """What a request to one handler must pass.

    A request that passes carries `request.state.delivery_id`: the sender's, else the body's sha256.
    """

    path: str
    proof: Proof
    max_body_bytes: int
    body_timeout_seconds: float
    answers: Answers
    history: History
    durable: DurableDeliveries | None
    """Where the handler's deliveries wait; None for one that is called while its sender waits."""

    async def enter(self, request: Request, inner: Inner) -> Response:
        """The handler's answer, or the reason why the handler was not called."""
        at, began, status = time.time(), time.perf_counter(), 500
        sent_id = sent_delivery_id(request.headers)
        try:
            answer = await self._pass(request, sent_id, inner)
            status = answer.status_code
            return answer
        except RequestValidationError:
            status = 422
            raise
        except HTTPException as refusal:
            status = refusal.status_code
            raise
        finally:
            self.history.add(
                Received(
                    at=at,
                    path=self.path,
                    delivery_id=None if sent_id is None else sent_id[:64],
                    status=status,
                    milliseconds=(time.perf_counter() - began) * 1e3,
                )
            )

    async def _pass(self, request: Request, sent_id: str | None, inner: Inner) -> Response:
        try:
            async with asyncio.timeout(self.body_timeout_seconds):
                body = await self._read(request)
            self.proof.check(request.headers, body)
            event = read_event(self.proof.scheme, request.headers, body)
        except ReceiverError as refusal:
            return JSONResponse({"error": str(refusal)}, status_code=refusal.status_code)
        except TimeoutError:
            return JSONResponse({"error": "The body did not arrive in time."}, status_code=408)
        except ClientDisconnect:
            return Response(status_code=400)
        if isinstance(event, NotAPush):
            return JSONResponse(event.answer)

        request.state.delivery_id = sent_id or hashlib.sha256(body).hexdigest()
        if self.durable is not None:
            return await self._store(self.durable, request, event)
        proven = _with_body(request, event)
        if sent_id is None:
            return await inner(proven)
        return await self.answers.once((self.path, sent_id), lambda: inner(proven))

    async def _store(
        self, durable: DurableDeliveries, request: Request, event: bytes
    ) -> JSONResponse:
        try:
            WebhookPayload.model_validate_json(event)
        except ValidationError as error:
            # Refused now, while the sender listens: no later call would succeed.
            raise RequestValidationError(
                [{**entry, "loc": ("body", *entry["loc"])} for entry in error.errors()]
            ) from error
        id: str = request.state.delivery_id
        try:
            headers = {**request.headers, **_headers_of(event)}
            is_new = await durable.accept(self.path, id, headers, event)
        except NotWorking as refusal:
            _logger.error("%s: %s", self.path, refusal)
            return JSONResponse({"error": str(refusal)}, status_code=refusal.status_code)
        return JSONResponse({"delivery": id, "is_new": is_new}, status_code=202)

    async def _read(self, request: Request) -> bytes:
        announced = request.headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > self.max_body_bytes:
            raise self._too_large()
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > self.max_body_bytes:
                raise self._too_large()
        return bytes(body)

    def _too_large(self) -> BodyTooLarge:
        return BodyTooLarge(f"The body is larger than {self.max_body_bytes} bytes.")


def guarded(door: Door) -> type[APIRoute]:
    """A route class whose every route is behind `door`; there is no way around it by the path."""

    class Guarded(APIRoute):
        def get_route_handler(self) -> Inner:
            inner = super().get_route_handler()

            async def enter(request: Request) -> Response:
                return await door.enter(request, inner)

            return enter

    return Guarded


def sent_delivery_id(headers: Mapping[str, str]) -> str | None:
    """The id under which a sender repeats a delivery, None when it sends none."""
    if is_svix(headers):
        return headers.get("svix-id") or None  # the one that is signed
    return next((headers[name] for name in _ID_HEADERS if headers.get(name)), None)


def _with_body(request: Request, body: bytes) -> Request:
    headers = MutableHeaders(scope={"headers": list(request.scope["headers"])})
    headers.update(_headers_of(body))
    return _Proven({**request.scope, "headers": headers.raw}, _replay(body, request.receive))


def _headers_of(body: bytes) -> dict[str, str]:
    """A webhook is JSON, whatever the sender's client wrote there."""
    return {"content-type": "application/json", "content-length": str(len(body))}


class _Proven(Request):
    async def json(self) -> Any:
        # Starlette's takes UTF-16 as well.
        if hasattr(self, "_json"):
            return self._json
        try:
            self._json = json.loads((await self.body()).decode())
            return self._json
        except (UnicodeDecodeError, RecursionError) as error:
            # FastAPI answers 422 to this one and 400 to all others.
            raise json.JSONDecodeError(str(error), "", 0) from error


def _replay(body: bytes, then: Receive) -> Receive:
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        return messages.pop() if messages else await then()

    return receive
