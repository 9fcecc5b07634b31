"""What all open pages share: a value that is made once for all of them, and the news that something
has changed which pages show."""

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from starlette.concurrency import run_in_threadpool

Value = TypeVar("Value")

LOOK_SECONDS = 1.0
PAGES_A_SECOND = 3
"""About how many pages are told of changes per second: each then asks for itself again. If more
pages are open, each is told more rarely."""


@dataclass
class Shared(Generic[Value]):
    value: Value
    made_at: float = -LOOK_SECONDS
    """When the making of the value began, on the monotonic clock."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def get(self, make: Callable[[], Value], since: float = 0.0) -> Value:
        """The value that `make` returns, which is at most LOOK_SECONDS old, and was made after
        `since` (on the monotonic clock). `make` runs in a thread, and only once at a time: it may
        ask the hub itself, which needs threads too."""
        async with self.lock:
            now = time.monotonic()
            if now - self.made_at >= LOOK_SECONDS or self.made_at <= since:
                self.value = await run_in_threadpool(make)
                self.made_at = now
            return self.value


@dataclass
class Watch:
    digest: Shared[str] = field(default_factory=partial(Shared, ""))
    """Of what pages show; empty if nobody has looked yet."""
    num_streams: int = 0

    async def changes(
        self, look: Callable[[], Iterator[Any]], seen: str, is_over: Callable[[], bool]
    ) -> AsyncIterator[str]:
        """Yields the digest of what `look` yields each time it differs from `seen`, the digest
        before it. Ends once `is_over`."""
        self.num_streams += 1
        try:
            while not is_over():
                if seen != (digest := await self.digest.get(partial(_digest, look))):
                    yield (seen := digest)
                await asyncio.sleep(max(LOOK_SECONDS, self.num_streams / PAGES_A_SECOND))
        finally:
            self.num_streams -= 1


def _digest(look: Callable[[], Iterator[Any]]) -> str:
    return hashlib.sha256(repr(list(look())).encode()).hexdigest()[:16]
