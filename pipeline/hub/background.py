"""Runs the hub's periodic tasks, such as the removal of old deliveries."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

logger = logging.getLogger(__name__)


async def every(seconds: float, act: Callable[[], Awaitable[object]], name: str) -> None:
    """Calls `act` every `seconds` until it is cancelled, the first time after `seconds`. `name`
    completes "cannot …" in the log."""
    while True:
        await asyncio.sleep(seconds)
        try:
            await act()
        except Exception:
            # In most cases a full disk or a lock, so the next call may succeed.
            logger.exception("cannot %s; trying again in %g s", name, seconds)
