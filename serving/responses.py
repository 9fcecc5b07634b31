"""Answers as they are sent. One that the client hangs up on ends: its slot is free at once."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from serving.request_errors import ClientGone, translated

logger = logging.getLogger(__name__)

T = TypeVar("T")


async def unless_disconnected(request: Request, work: Awaitable[T]) -> T:
    """`work`'s result; when the client goes first, `work` is cancelled. Raises ClientGone.

    Cancelled in the turn in which `work` ends, it drops the result: who must give that back makes
    `work` a task, and looks.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


class EventStream(Response):
    """Server-sent events from a generator.

    An error before the first event is an ordinary error response; one after it ends the stream with
    an error event. So does one that goes on after `deadline`, a moment of the event loop's clock.
    `on_end` is called exactly once, however it ends.
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
        stream = asyncio.ensure_future(self._send(scope, receive, send))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({stream, gone}, return_when=asyncio.FIRST_COMPLETED)
            if stream.done():
                stream.result()
            else:
                self._status = 499
        finally:
            for each in (stream, gone):
                each.cancel()
            await asyncio.gather(stream, gone, return_exceptions=True)
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
                        await send(
                            {
                                "type": "http.response.start",
                                "status": 200,
                                "headers": self.raw_headers,
                            }
                        )
                    await send(
                        {"type": "http.response.body", "body": event.encode(), "more_body": True}
                    )
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


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def json_response(
    content: dict[str, Any], *, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    return Response(
        json.dumps(content, ensure_ascii=False),
        status_code=status,
        headers=headers,
        media_type="application/json",
    )
