"""A value that all open pages share, made once for all of them."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from starlette.concurrency import run_in_threadpool

Value = TypeVar("Value")

LOOK_SECONDS = 1.0


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
