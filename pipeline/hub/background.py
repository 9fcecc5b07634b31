"""What the hub does on its own, again and again while it serves."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

logger = logging.getLogger(__name__)


async def every(seconds: float, act: Callable[[], Awaitable[object]], name: str) -> None:
    """Until it is cancelled; the first time after `seconds`."""
    while True:
        await asyncio.sleep(seconds)
        try:
            await act()
        except Exception:
            # A full disk or a lock, mostly: the next time may be better, and there must be one.
            logger.exception("cannot %s; trying again in %g s", name, seconds)
