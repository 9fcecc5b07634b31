"""Limits the memory that the bodies of all running requests take together."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

FREE_BYTES = 64 * 1024
"""The first bytes of each body do not count towards the limit. So a small request is accepted even
while a few clients use up the limit with large bodies that they never finish."""

_NUM_LARGE = 8
"""How many bodies of the largest size may be in memory at once."""


class BodiesInFlight:
    """Counts the bytes of all bodies in memory, except the first `FREE_BYTES` of each. The limit is
    `_NUM_LARGE` times `max_body_bytes`, which is the largest size of one body."""

    def __init__(self, max_body_bytes: int) -> None:
        self._max_bytes = _NUM_LARGE * max_body_bytes
        self._num_bytes = 0

    @contextmanager
    def body(self) -> Iterator[Callable[[int], None]]:
        """Yields a function that counts one body. Keep the `with` block open until the request is
        answered.

        Call the function with the size of each piece of the body that arrives. It raises
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
    """Middleware that applies the limit of `BodiesInFlight` to all requests of `app`. Use it for an
    application that keeps each request body in memory."""

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
