"""Ends the work for a request when its client disconnects."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from starlette.types import Receive

from serving.request_errors import ClientGone

T = TypeVar("T")


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
