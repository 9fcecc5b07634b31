"""Gives each request an id, and sends this id back with the answer."""

import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_ID_LENGTH = 256


class RequestIds:
    """Middleware that sends the header `X-Request-Id` of a request back with its answer. If the
    request has no such header, or one that is too long, the middleware makes a new id and puts it
    into the request's headers, where the application reads it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = Headers(scope=scope).get("x-request-id", "")
        if not 0 < len(request_id) <= MAX_ID_LENGTH:
            request_id = uuid.uuid4().hex
            others = [each for each in scope["headers"] if each[0] != b"x-request-id"]
            scope["headers"] = [*others, (b"x-request-id", request_id.encode())]

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        await self._app(scope, receive, send_named)
