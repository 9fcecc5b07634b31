"""Sends a response of server-sent events, and ends the work for a request when its client
disconnects."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import TypeVar

from fastapi import Response
from starlette.types import Receive, Scope, Send

from serving.request_errors import ClientGone, translated

T = TypeVar("T")

HEADER_SECONDS = 1.0
"""Most errors come sooner, and then have a status of their own."""
COMMENT_SECONDS = 15.0
"""Time between two comments. Proxies drop a connection that is idle for 30 to 60 seconds."""


class EventStream(Response):
    """Sends the events of a generator as server-sent events.

    The headers are sent with the first event, or after `HEADER_SECONDS`. Comments follow until the
    first event, so that no proxy drops a stream that waits in the queue of the engine. If an error
    occurs before the headers are sent, the client gets an error response. If it occurs later, the
    stream ends with an error event. It is also an error if the stream has not ended at `deadline`
    (a time of the event loop's clock). When the response ends, for any reason, `on_end`
    is called once with the HTTP status for the metrics.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[str, None],
        *,
        headers: Mapping[str, str],
        deadline: float,
        on_end: Callable[[int], None],
    ) -> None:
        super().__init__(headers={**headers, "Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._events = events
        self._deadline = deadline
        self._on_end = on_end
        self._status = 200

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(receive, self._send(scope, receive, send))
        except ClientGone as gone:
            self._status = gone.status
        finally:
            try:
                await self._events.aclose()
            finally:
                self._on_end(self._status)

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_started = False

        async def write(content: str) -> None:
            nonlocal has_started
            if not has_started:
                has_started = True
                start = {"status": 200, "headers": self.raw_headers}
                await send({"type": "http.response.start", **start})
            body = {"body": content.encode(), "more_body": True}
            await send({"type": "http.response.body", **body})

        first = asyncio.ensure_future(self._first_event())
        try:
            try:
                async with asyncio.timeout_at(self._deadline):
                    seconds = HEADER_SECONDS
                    while not (await asyncio.wait({first}, timeout=seconds))[0]:
                        await write(": waiting\n\n")
                        seconds = COMMENT_SECONDS
                    await write(first.result())
                    async for event in self._events:
                        await write(event)
            finally:
                # The generator cannot be closed while a task waits for its first event.
                first.cancel()
                await asyncio.gather(first, return_exceptions=True)
        except Exception as error:
            problem = translated(error)
            self._status = problem.status
            response = problem.response()
            if not has_started:
                await response(scope, receive, send)
                return
            await write(f"data: {bytes(response.body).decode()}\n\ndata: [DONE]\n\n")
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _first_event(self) -> str:
        return await anext(self._events)


async def unless_disconnected(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`. If the client disconnects before `work` ends, cancels `work` and raises
    ClientGone.

    If this function is cancelled in the same turn of the event loop in which `work` ends, the
    result of `work` is lost. A caller that must release this result should pass a task, and look at
    the task's result after the cancellation.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
