"""`Swapper` runs one swap after another, and decides what the server serves at its start.

A swap makes another release live: this release then answers all new requests. One swap runs at a
time. The newest request wins: an older swap ends before its next phase, unless the engine has begun
to use its weights. `swap_phases.py` performs a swap.
"""

import asyncio
import logging
from collections.abc import Collection
from pathlib import Path
from typing import Literal

from serving.admission import Admission, Unserved
from serving.engine import Engine
from serving.errors import ReleaseError, Superseded
from serving.metrics import Metrics
from serving.settings import ServingSettings
from serving.swap_attempt import SwapAttempt, SwapStopped
from serving.swap_checks import servable_folder
from serving.swap_phases import SwapPhases
from serving.swap_schemas import SwapResult
from serving.weights import release_removal, release_store

logger = logging.getLogger(__name__)


class Swapper:
    """Runs the swaps of one server. Call all methods on its event loop."""

    def __init__(
        self,
        *,
        engine: Engine,
        admission: Admission,
        settings: ServingSettings,
        releases_dir: Path,
        pipeline: str,
        metrics: Metrics,
    ) -> None:
        self._admission = admission
        self._releases_dir = releases_dir
        self._metrics = metrics
        self._phases = SwapPhases(
            engine=engine,
            admission=admission,
            settings=settings,
            releases_dir=releases_dir,
            pipeline=pipeline,
        )
        self._lock = asyncio.Lock()
        self._unfinished: dict[SwapAttempt, asyncio.Task[SwapResult]] = {}
        """In the order of the requests. Only the last one has not been superseded."""

    async def start(self, folder: Path | None = None) -> None:
        """Serve `folder`; if it is a checkpoint with `.bin` shards, publish it first. If `folder`
        is None, serve the release that was live last, and then swap in the pending release, if one
        was chosen for the next start of the server.

        If the release that was live last is refused, the newest undamaged release that was live
        before it is served as its substitute. If there is no substitute, the server waits for a
        swap, and its answers say why no release is served. Raises ReleaseError if `folder` cannot
        be served.
        """
        if folder is not None:
            folder = await asyncio.to_thread(servable_folder, folder, self._releases_dir)
            result = await self._enqueue(folder, is_recorded=False)
            if result.result != "live":
                raise ReleaseError(*result.reasons)
            return
        release_removal.sweep(self._releases_dir)
        await self._start_with_last_live()
        try:
            pending = release_store.pending_release(self._releases_dir)
        except ReleaseError as error:
            logger.error("%s: %s", self._releases_dir / release_store.PENDING, error)
            return
        if pending is not None:
            await self._enqueue(self._releases_dir / pending)

    async def _start_with_last_live(self) -> None:
        try:
            release_store.served_release(self._releases_dir)
        except ReleaseError as error:
            logger.error("%s: %s", self._releases_dir / release_store.CURRENT, error)
            self._admission.unserved = Unserved(id=release_store.CURRENT, reasons=error.reasons)
        unserved: Unserved | None = None
        for release_id in reversed(release_store.live_releases(self._releases_dir)):
            result = await self._enqueue(
                self._releases_dir / release_id, was_live=True, stands_in_for=unserved
            )
            if result.result == "live":
                if unserved is not None:
                    logger.error("%s; %s is served as its substitute", unserved, release_id)
                return
            unserved = unserved or Unserved(id=release_id, reasons=result.reasons)
            self._admission.unserved = unserved
            if result.result != "refused":
                # The engine or the disk has failed, so an older release would fail too.
                return
        if unserved is not None:
            logger.error("%s; there is no substitute for it", unserved)

    async def swap(
        self, requested: str, instead_of: Collection[str | None] | None = None
    ) -> SwapResult:
        """Make a release live. `requested` is the id of the release, or the path of its folder. A
        relative path is relative to the folder of the pipeline's releases. `SwapRequest` explains
        `instead_of`.

        If the caller is cancelled, the swap goes on.
        """
        folder = self._folder(requested)
        if folder is None:
            reason = f"there is no release in {self._releases_dir} for {requested!r}"
            return self._not_begun("refused", requested, reason)
        if instead_of is not None:
            try:
                await asyncio.to_thread(
                    release_store.set_pending,
                    self._releases_dir,
                    folder.name,
                    instead_of=instead_of,
                )
                # Another release may have been chosen and requested before the thread ended.
                if (chosen := release_store.chosen_release_id(self._releases_dir)) != folder.name:
                    raise Superseded(folder.name, chosen)
            except Superseded as moved:
                return self._not_begun("superseded", folder.name, str(moved), moved.chosen)
            except OSError as error:
                return self._not_begun("failed", folder.name, str(error))
        return await self._enqueue(folder)

    async def close(self) -> None:
        """End all swaps; they get the result `failed`."""
        tasks = list(self._unfinished.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._phases.close()

    def _not_begun(
        self,
        how: Literal["refused", "superseded", "failed"],
        release: str,
        reason: str,
        superseded_by: str | None = None,
    ) -> SwapResult:
        result = SwapResult(
            result=how,
            release=release,
            previous=self._live_id(),
            phase="preflight",
            reasons=(reason,),
            superseded_by=superseded_by,
        )
        self._metrics.count_swap(result)
        return result

    def _folder(self, requested: str) -> Path | None:
        """The folder of the release with this id or path; None if there is no such release."""
        if "\0" in requested:  # `resolve` would raise ValueError
            return None
        found = (self._releases_dir / requested).resolve()
        inside = found.parent == self._releases_dir.resolve()
        if not inside or found.name not in release_store.release_ids(self._releases_dir):
            return None
        return self._releases_dir / found.name

    async def _enqueue(
        self,
        folder: Path,
        *,
        is_recorded: bool = True,
        was_live: bool = False,
        stands_in_for: Unserved | None = None,
    ) -> SwapResult:
        newest = next(reversed(self._unfinished), None)
        if newest is not None and newest.folder == folder:
            return await asyncio.shield(self._unfinished[newest])
        swap = SwapAttempt(
            folder=folder, is_recorded=is_recorded, was_live=was_live, stands_in_for=stands_in_for
        )
        for older in self._unfinished:
            older.superseded_by = swap.release_id
        self._unfinished[swap] = asyncio.create_task(self._run(swap))
        return await asyncio.shield(self._unfinished[swap])

    async def _run(self, swap: SwapAttempt) -> SwapResult:
        try:
            async with self._lock:
                result = await self._perform(swap)
                if result.result != "deferred":
                    await self._clear_pending(swap)
        except asyncio.CancelledError:
            result = swap.ended("failed", self._live_id(), "the server is shutting down")
        finally:
            del self._unfinished[swap]
        self._log_and_count(swap, result)
        return result

    def _log_and_count(self, swap: SwapAttempt, result: SwapResult) -> None:
        # `is_recorded` is False if a folder was named at the start of the server. If this swap
        # fails, `start` raises an error, so the log needs no warning.
        trouble = logging.WARNING if swap.is_recorded else logging.DEBUG
        level = logging.INFO if result.result == "live" else trouble
        logger.log(
            level,
            "swap to %s: %s in phase %s; %s",
            result.release,
            result.result,
            result.phase,
            "; ".join(result.reasons) or f"previous release {result.previous}",
            extra={"release": result.release},
        )
        self._metrics.count_swap(result)

    async def _clear_pending(self, swap: SwapAttempt) -> None:
        """Remove the mark `pending` of the release after its swap, even if the swap failed.
        Otherwise every start of the server would try a release that cannot be served.

        A swap to a substitute leaves the mark, because this is not the swap that somebody asked
        for. If the substitute has the mark, the swap that somebody asked for will follow. A
        superseded swap leaves the mark if the newest swap is to the same release.
        """
        newest = next(reversed(self._unfinished))
        has_successor = newest is not swap and newest.folder == swap.folder
        if swap.is_recorded and swap.stands_in_for is None and not has_successor:
            try:
                await asyncio.to_thread(
                    release_store.clear_pending, self._releases_dir, swap.release_id
                )
            except OSError as error:
                logger.error("%s: %s", self._releases_dir / release_store.PENDING, error)

    async def _perform(self, swap: SwapAttempt) -> SwapResult:
        try:
            swap.stop_if_superseded()
            previous = await self._phases.perform(swap)
        except SwapStopped as stopped:
            return swap.ended(stopped.result, self._live_id(), *stopped.reasons)
        except Exception as error:
            logger.exception("swap to %s: unexpected error", swap.release_id)
            return swap.ended("failed", self._live_id(), f"{type(error).__name__}: {error}")
        return swap.ended("live", previous.id if previous else None)

    def _live_id(self) -> str | None:
        return self._admission.live.id if self._admission.live else None
