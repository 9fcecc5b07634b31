"""Writes the link `current` on disk, which names the served release, when another release becomes
the served one. A thread writes it, because a disk may hang."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from serving.admission import LiveRelease
from serving.errors import ReleaseError
from serving.swap_attempt import SwapStopped, bounded
from serving.weights import release_store


class CurrentLink:
    """The link `current` of one pipeline.

    If the disk hangs, a caller waits at most `limit_seconds`, but the write itself goes on. One
    thread does all writes in the order of the calls, so the last call decides what `current` is."""

    def __init__(self, releases_dir: Path, limit_seconds: float) -> None:
        self._releases_dir = releases_dir
        self._limit_seconds = limit_seconds
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="current-link")

    async def set(self, live: LiveRelease) -> None:
        """Make `current` name the release `live`. Raises SwapStopped if this fails or takes too
        long."""
        chosen = live.stands_in_for.id if live.stands_in_for is not None else None
        await self._write(partial(release_store.set_current, self._releases_dir, live.id, chosen))

    async def remove(self, folder: Path) -> None:
        """Remove `current` if it leads to `folder`. Raises SwapStopped if this fails or takes too
        long."""
        await self._write(partial(self._remove, folder))

    def close(self) -> None:
        """Let the thread end after the writes that were already requested. Does not wait for it."""
        self._thread.shutdown(wait=False)

    def _remove(self, folder: Path) -> None:
        if release_store.served_release(self._releases_dir) == folder:
            (self._releases_dir / release_store.CURRENT).unlink()

    async def _write(self, write: Callable[[], None]) -> None:
        written = asyncio.get_running_loop().run_in_executor(self._thread, write)

        async def wait() -> None:
            # Without `shield`, the time limit would cancel a write that has not begun.
            await asyncio.shield(written)

        link = self._releases_dir / release_store.CURRENT
        try:
            await bounded(wait(), self._limit_seconds)
        except TimeoutError:
            raise SwapStopped(
                "failed", f"{link}: the link was not written within {self._limit_seconds:g} s"
            ) from None
        except (OSError, ReleaseError) as error:
            raise SwapStopped("failed", f"{link}: {error}") from None
