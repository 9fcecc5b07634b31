"""Writing together what arrives together: one wait for the disk for all of it."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class Batches(Generic[Item, Result]):
    """While one batch is being written the next one gathers; `write` never runs twice at a time.

    `write` gives one result for each item. What it raises, each item of its batch raises.
    """

    def __init__(self, write: Callable[[Sequence[Item]], Awaitable[Sequence[Result]]]) -> None:
        self._write = write
        self._arrived: list[tuple[Item, asyncio.Future[Result]]] = []
        self._writing: asyncio.Task[None] | None = None
        self._at_work_until = 0.0

    async def quiet(self, *, for_seconds: float, within_seconds: float) -> None:
        """Return when nothing was added or written for so long, or after the second time in any
        case."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + within_seconds
        while (now := loop.time()) < deadline:
            if self._is_writing():
                self._at_work_until = now
            if (quiet_at := self._at_work_until + for_seconds) <= now:
                return
            await asyncio.sleep(min(quiet_at, deadline) - now)

    async def add(self, item: Item) -> Result:
        """Its result, when the batch that it went into is written."""
        loop = asyncio.get_running_loop()
        result: asyncio.Future[Result] = loop.create_future()
        self._at_work_until = loop.time()
        self._arrived.append((item, result))
        if not self._is_writing():
            self._writing = asyncio.create_task(self._write_all())
        return await result

    def _is_writing(self) -> bool:
        return self._writing is not None and not self._writing.done()

    async def _write_all(self) -> None:
        while self._arrived:
            await asyncio.sleep(0)  # what the loop has at hand already goes along
            batch, self._arrived = self._arrived, []
            try:
                results = await self._write([item for item, _ in batch])
            except Exception as error:
                # Each sender's, whatever it is: nothing of the batch was written.
                for _, future in batch:
                    if not future.done():
                        future.set_exception(error)
                continue
            for (_, future), result in zip(batch, results, strict=True):
                if not future.done():  # a sender may have gone
                    future.set_result(result)
