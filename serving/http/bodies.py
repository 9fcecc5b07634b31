"""Limits how much memory the bodies of all running requests together may take."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

FREE_BYTES = 64 * 1024
"""This many bytes of each body do not count towards the limit. So a small request is accepted even
while a few large bodies that never end use up the limit."""

_NUM_LARGE = 8


class BodiesInFlight:
    """Counts the bytes of all bodies in memory. The limit is `_NUM_LARGE` times `max_body_bytes`,
    the largest size of one body."""

    def __init__(self, max_body_bytes: int) -> None:
        self._max_bytes = _NUM_LARGE * max_body_bytes
        self._num_bytes = 0

    @contextmanager
    def body(self) -> Iterator[Callable[[int], None]]:
        """Counts one body. Keep the `with` block open until the request is answered.

        Call the given function with the size of each piece that arrives. The function raises
        `HTTPException` 503 if all bodies together exceed the limit.
        """
        num_counted = -FREE_BYTES

        def count(num_bytes: int) -> None:
            nonlocal num_counted
            before = max(num_counted, 0)
            num_counted += num_bytes
            self._num_bytes += max(num_counted, 0) - before
            if num_counted > 0 and self._num_bytes > self._max_bytes:
                raise HTTPException(
                    503,
                    "The server is receiving too many large requests at once; send this request "
                    "again later.",
                    headers={"Retry-After": "1"},
                )

        try:
            yield count
        finally:
            self._num_bytes -= max(num_counted, 0)


class LimitedBodies:
    """Puts this limit in front of `app`, an application that keeps each request body in memory."""

    def __init__(self, app: ASGIApp, *, max_body_bytes: int) -> None:
        self._app = app
        self._bodies = BodiesInFlight(max_body_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        with self._bodies.body() as count:

            async def counted() -> Message:
                message = await receive()
                count(len(message.get("body", b"")))
                return message

            await self._app(scope, counted, send)
