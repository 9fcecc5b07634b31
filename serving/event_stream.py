"""Sends a response of server-sent events, and ends the work for a request when its client
disconnects."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import TypeVar

from fastapi import Response
from starlette.types import Receive, Scope, Send

from serving.request_errors import ClientGone, translated

T = TypeVar("T")


class EventStream(Response):
    """Sends the events of a generator as server-sent events.

    If an error occurs before the first event, the client gets an error response. If it occurs
    later, the stream ends with an error event. It is also an error if the stream has not ended at
    `deadline` (a time of the event loop's clock). When the response ends, for any reason, `on_end`
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
        try:
            async with asyncio.timeout_at(self._deadline):
                async for event in self._events:
                    if not has_started:
                        has_started = True
                        start = {"status": 200, "headers": self.raw_headers}
                        await send({"type": "http.response.start", **start})
                    body = {"body": event.encode(), "more_body": True}
                    await send({"type": "http.response.body", **body})
        except Exception as error:
            problem = translated(error)
            self._status = problem.status
            response = problem.response()
            if not has_started:
                await response(scope, receive, send)
                return
            event_bytes = b"data: " + bytes(response.body) + b"\n\ndata: [DONE]\n\n"
            await send({"type": "http.response.body", "body": event_bytes, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


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
