"""Writes items in batches. While one write runs, new items are collected. The next write stores all
collected items together, so it waits for the disk only once."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class Batches(Generic[Item, Result]):
    """Collects the next batch while the current batch is being written. Only one `write` runs at a
    time.

    `write` gets the items of a batch, and returns one result per item in the same order. If `write`
    raises an error, `add` raises this error for each item of the batch.
    """

    def __init__(self, write: Callable[[Sequence[Item]], Awaitable[Sequence[Result]]]) -> None:
        self._write = write
        self._arrived: list[tuple[Item, asyncio.Future[Result]]] = []
        self._writing: asyncio.Task[None] | None = None
        self._busy_until = 0.0

    async def wait_until_quiet(self, *, for_seconds: float, within_seconds: float) -> None:
        """Wait until nothing has been added or written for `for_seconds`, but wait no longer than
        `within_seconds`."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + within_seconds
        while (now := loop.time()) < deadline:
            if self._is_writing():
                self._busy_until = now
            if (quiet_at := self._busy_until + for_seconds) <= now:
                return
            await asyncio.sleep(min(quiet_at, deadline) - now)

    async def add(self, item: Item) -> Result:
        """Put the item into the next batch, wait until this batch is written, and return the item's
        result."""
        loop = asyncio.get_running_loop()
        result: asyncio.Future[Result] = loop.create_future()
        self._busy_until = loop.time()
        self._arrived.append((item, result))
        if not self._is_writing():
            self._writing = asyncio.create_task(self._write_all())
        return await result

    def _is_writing(self) -> bool:
        return self._writing is not None and not self._writing.done()

    async def _write_all(self) -> None:
        while self._arrived:
            await asyncio.sleep(0)  # let other tasks add their items to this batch first
            batch, self._arrived = self._arrived, []
            try:
                results = await self._write([item for item, _ in batch])
            except Exception as error:
                # Some items may have been written, but it is not known which items. So raise the
                # error in every `add` that waits for this batch.
                for _, future in batch:
                    if not future.done():
                        future.set_exception(error)
                continue
            for (_, future), result in zip(batch, results, strict=True):
                # If a call of `add` was cancelled, for example because the sender has disconnected,
                # the future of this call is cancelled too, and is already done.
                if not future.done():
                    future.set_result(result)
