"""A limit for the bodies of all requests together."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

FREE_BYTES = 64 * 1024
"""Of each body, that do not count. So a few large bodies that do not end keep no small one out."""

_NUM_LARGE = 8


class BodiesInFlight:
    """Counts the bodies that are kept in memory. Their limit is that of several largest bodies."""

    def __init__(self, max_body_bytes: int) -> None:
        self._max_bytes = _NUM_LARGE * max_body_bytes
        self._num_bytes = 0

    @contextmanager
    def body(self) -> Iterator[Callable[[int], None]]:
        """One body, until its request is answered. Call the function with the size of each piece.

        The function raises `HTTPException` 503 if there is too much.
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
                    "Too many large requests arrive at once: send this one again later.",
                    headers={"Retry-After": "1"},
                )

        try:
            yield count
        finally:
            self._num_bytes -= max(num_counted, 0)


class LimitedBodies:
    """In front of an application that keeps the body of each request in memory."""

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
