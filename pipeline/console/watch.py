"""Sees that something has changed which pages show: `/events` tells it to all open pages."""

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from starlette.concurrency import run_in_threadpool

LOOK_SECONDS = 1.0
PAGES_A_SECOND = 15
"""How many pages are told of a change per second at most: each then asks for itself again."""


@dataclass
class Watch:
    """One look serves all pages."""

    digest: str = ""
    """Of what pages show, when it was looked at last; empty if nobody has looked yet."""
    looked_at: float = 0.0
    num_streams: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def changes(
        self, look: Callable[[], Iterator[Any]], seen: str, is_over: Callable[[], bool]
    ) -> AsyncIterator[str]:
        """Yields the digest each time it has changed from `seen`, until `is_over`."""
        self.num_streams += 1
        try:
            while not is_over():
                await self._refresh(look)
                if seen != self.digest:
                    seen = self.digest
                    yield seen
                await asyncio.sleep(max(LOOK_SECONDS, self.num_streams / PAGES_A_SECOND))
        finally:
            self.num_streams -= 1

    async def _refresh(self, look: Callable[[], Iterator[Any]]) -> None:
        async with self.lock:
            if time.monotonic() - self.looked_at >= LOOK_SECONDS:
                self.digest = await run_in_threadpool(_digest, look)
                self.looked_at = time.monotonic()


def _digest(look: Callable[[], Iterator[Any]]) -> str:
    return hashlib.sha256(repr(list(look())).encode()).hexdigest()[:16]
