"""`CurrentLink`: `current` on disk follows what is served. Written off the event loop, in order."""

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
    """A disk that hangs delays nobody longer than `limit_seconds`. What was asked of it still
    happens, one after the other, so that the last word is the server's last one."""

    def __init__(self, releases_dir: Path, limit_seconds: float) -> None:
        self._releases_dir = releases_dir
        self._limit_seconds = limit_seconds
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="current-link")

    async def set(self, live: LiveRelease) -> None:
        """Raises SwapStopped."""
        chosen = live.stands_in_for.id if live.stands_in_for is not None else None
        await self._write(partial(release_store.set_current, self._releases_dir, live.id, chosen))

    async def remove(self, folder: Path) -> None:
        """If it leads to `folder`. Raises SwapStopped."""
        await self._write(partial(self._remove, folder))

    def close(self) -> None:
        self._thread.shutdown(wait=False)

    def _remove(self, folder: Path) -> None:
        if release_store.served_release(self._releases_dir) == folder:
            (self._releases_dir / release_store.CURRENT).unlink()

    async def _write(self, write: Callable[[], None]) -> None:
        written = asyncio.get_running_loop().run_in_executor(self._thread, write)

        async def wait() -> None:
            # A write that has not begun must not be taken back with who waits for it.
            await asyncio.shield(written)

        link = self._releases_dir / release_store.CURRENT
        try:
            await bounded(wait(), self._limit_seconds)
        except TimeoutError:
            raise SwapStopped(
                "failed", f"{link}: not written within {self._limit_seconds:g} s"
            ) from None
        except (OSError, ReleaseError) as error:
            raise SwapStopped("failed", f"{link}: {error}") from None
