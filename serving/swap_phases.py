"""`SwapPhases` performs the phases of a swap. If a phase fails, the old release is served again.

    preflight   the server checks the new release on disk and loads its tokenizer
    stage       the engine prepares the new weights, while the old release answers requests
    commit      the engine begins to use the new weights
    probe       the server compares log-probabilities with those that the job recorded
    barrier     new requests wait, and then get the new release

With an engine that can hold two releases, the order is: preflight, stage, commit, probe, barrier.
New requests get the old release until the barrier, which lasts only one turn of the event loop.

With an engine that can hold only one release, the order is: preflight, stage, barrier, commit,
probe. The barrier first waits until the running requests have ended, and holds new requests back
until the probe has ended.

If the commit or the probe fails, the engine commits the old release again. While the barrier is
closed, everything that is awaited has a time limit, and a `finally` opens the barrier. So an engine
or a disk that hangs cannot keep the barrier closed.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from serving.admission import Admission, LiveRelease
from serving.engine import Engine, StageError
from serving.errors import ReleaseError, is_temporary
from serving.settings import ServingSettings
from serving.swap_attempt import SwapAttempt, SwapStopped, bounded
from serving.swap_checks import checked_release, measure_probe
from serving.tokenizer import ReleaseTokenizer, load_tokenizer, tokenizer_files
from serving.weights import release_store
from serving.weights.release import Release

logger = logging.getLogger(__name__)

T = TypeVar("T")


class SwapPhases:
    """Performs swaps, one at a time."""

    def __init__(
        self,
        *,
        engine: Engine,
        admission: Admission,
        settings: ServingSettings,
        releases_dir: Path,
        pipeline: str,
    ) -> None:
        self._engine = engine
        self._admission = admission
        self._settings = settings
        self._releases_dir = releases_dir
        self._pipeline = pipeline
        self._link_writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="current-link")
        """Writes the link `current` on disk, which names the served release. This one thread does
        all writes in the order of the calls, so the last call decides what `current` is."""
        self._retiring: dict[str, asyncio.Task[None]] = {}
        """Id of a release that is loaded but not live → the task that unloads this release when its
        last request has ended."""

    async def close(self) -> None:
        """Stop the unloading of old releases. The thread that writes `current` ends after its last
        write; this method does not wait for it."""
        for task in (retiring := list(self._retiring.values())):
            task.cancel()
        await asyncio.gather(*retiring, return_exceptions=True)
        self._link_writer.shutdown(wait=False)

    async def perform(self, swap: SwapAttempt) -> LiveRelease | None:
        """Make the release of `swap` live. Returns the release that was live before, which may be
        the same release; None if there was none.

        Raises SwapStopped if the swap fails; the release that was live before is then still live.
        """
        previous = self._admission.live
        if previous is not None and previous.folder == swap.folder:
            return await self._choose_live(swap, previous)
        candidate = await self._preflight(swap)
        if previous is not None and previous.id == candidate.id:
            return await self._choose_live(swap, previous)
        await self._stage(swap, candidate)
        try:
            context = self._engine.max_context(candidate.id)
            candidate = replace(candidate, engine_context=context)
            if self._engine.holds_two:
                await self._switch_with_two(swap, candidate, previous)
            else:
                await self._switch_with_one(swap, candidate, previous)
        except BaseException:
            self._begin_retiring(candidate.id)
            raise
        swap.phase = "live"
        if previous is not None:
            self._begin_retiring(previous.id)
        return previous

    async def _choose_live(self, swap: SwapAttempt, live: LiveRelease) -> LiveRelease:
        """Perform a swap to the live release itself. If this release was a substitute, or was named
        only at the start of the server, it is now the release that the next start serves."""
        # Set the folder too: the server may have been started with another path to the release. If
        # a later swap fails, `current` is restored only for a release in the pipeline's folder.
        chosen = replace(live, folder=swap.folder, stands_in_for=None)
        await self._record(swap, chosen)
        self._admission.switch(chosen)
        swap.phase = "live"
        return live

    async def _preflight(self, swap: SwapAttempt) -> LiveRelease:
        with swap.timed("preflight"):
            try:
                release, tokenizer = await bounded(
                    asyncio.to_thread(self._read, swap.folder, self._admission.live),
                    self._settings.phase_seconds,
                )
            except TimeoutError:
                raise SwapStopped(
                    "failed", f"preflight took more than {self._settings.phase_seconds:g} s"
                ) from None
            except (ReleaseError, OSError) as error:
                # After a temporary error, an older release must not become a substitute.
                raise SwapStopped(
                    "failed" if is_temporary(error) else "refused",
                    *(
                        error.reasons
                        if isinstance(error, ReleaseError)
                        else (f"{swap.folder}: {error}",)
                    ),
                ) from None
        swap.stop_if_superseded()
        return LiveRelease(
            release=release,
            folder=swap.folder,
            tokenizer=tokenizer,
            live_since=int(time.time()),
            stands_in_for=swap.stands_in_for,
        )

    def _read(self, folder: Path, live: LiveRelease | None) -> tuple[Release, ReleaseTokenizer]:
        release = checked_release(folder, self._engine, self._releases_dir, self._pipeline)
        # Use the live tokenizer if its files have not changed, as in most releases. While a
        # tokenizer is being loaded, no other thread can run, so all streams pause.
        if live is not None and tokenizer_files(release) == tokenizer_files(live.release):
            return release, live.tokenizer
        return release, load_tokenizer(folder)

    async def _stage(self, swap: SwapAttempt, candidate: LiveRelease) -> None:
        if candidate.id in self._retiring and self._admission.is_used(candidate.id):
            # The release is still loaded, because it still answers requests. Do not unload it, and
            # do not read it from disk again.
            self._retiring.pop(candidate.id).cancel()
            swap.phase = "stage"
            return
        with swap.timed("stage"):
            try:
                await bounded(self._all_retired(), self._settings.drain_seconds)
            except TimeoutError:
                raise SwapStopped(
                    "deferred",
                    f"requests on {', '.join(self._retiring)} did not end within "
                    f"{self._settings.drain_seconds:g} s, and the engine cannot hold a third "
                    "release",
                ) from None
            swap.stop_if_superseded()
            try:
                await self._ask_engine(
                    "stage",
                    self._engine.stage(candidate.release, candidate.folder),
                    self._settings.phase_seconds,
                )
            except SwapStopped as stopped:
                if stopped.result == "failed":
                    await self._unload(candidate.id)
                raise

    async def _switch_with_two(
        self, swap: SwapAttempt, candidate: LiveRelease, previous: LiveRelease | None
    ) -> None:
        swap.stop_if_superseded()
        await self._commit(swap, candidate, previous, probe_seconds=self._settings.phase_seconds)
        # The block has no `await`, so no request has to wait at this barrier.
        with swap.timed("barrier"), self._admission.closed():
            self._admission.switch(candidate)

    async def _switch_with_one(
        self, swap: SwapAttempt, candidate: LiveRelease, previous: LiveRelease | None
    ) -> None:
        with self._admission.closed():
            with swap.timed("barrier"):
                if previous is not None:
                    await self._drain(previous)
                swap.stop_if_superseded()
            await self._commit(
                swap, candidate, previous, probe_seconds=self._settings.barrier_seconds
            )
            self._admission.switch(candidate)

    async def _drain(self, previous: LiveRelease) -> None:
        try:
            await bounded(self._admission.drained(previous.id), self._settings.drain_seconds)
        except TimeoutError:
            raise SwapStopped(
                "deferred",
                f"requests on {previous.id} did not end within "
                f"{self._settings.drain_seconds:g} s; request the swap again",
            ) from None

    async def _commit(
        self,
        swap: SwapAttempt,
        candidate: LiveRelease,
        previous: LiveRelease | None,
        *,
        probe_seconds: float,
    ) -> None:
        """Make the engine and the link `current` use `candidate`, if its probe agrees. Otherwise
        make them use `previous` again, and raise SwapStopped."""
        try:
            with swap.timed("commit"):
                committed = self._engine.commit(candidate.id)
                await self._ask_engine("commit", committed, self._commit_seconds)
            await self._probe(swap, candidate, probe_seconds)
            await self._record(swap, candidate)
        except BaseException:
            await self._restore_previous(swap, previous)
            raise

    async def _probe(self, swap: SwapAttempt, candidate: LiveRelease, limit_seconds: float) -> None:
        probe = candidate.release.probe
        if probe is None:
            return
        with swap.timed("probe"):
            bound = probe.bounds[self._engine.dtype_of(candidate.release)]
            measured = measure_probe(self._engine, candidate.id, probe, bound)
            found = await self._ask_engine("probe", measured, limit_seconds)
        swap.max_difference = found.max_difference
        if found.reasons:
            raise SwapStopped("refused", *found.reasons)

    async def _ask_engine(self, what: str, answer: Awaitable[T], seconds: float) -> T:
        """The engine's answer. Raises SwapStopped if the engine refuses the release, fails, or
        takes longer than `seconds`."""
        try:
            return await bounded(answer, seconds)
        except StageError as error:
            raise SwapStopped("refused", *error.reasons) from None
        except TimeoutError:
            raise SwapStopped("failed", f"{what} took more than {seconds:g} s") from None
        except Exception as error:
            raise SwapStopped("failed", f"{what}: {error}") from error

    async def _record(self, swap: SwapAttempt, live: LiveRelease) -> None:
        """Make `current` name the release `live`. Raises SwapStopped if this fails or takes too
        long."""
        if swap.is_recorded:
            chosen = live.stands_in_for.id if live.stands_in_for is not None else None
            await self._write_link(
                partial(release_store.set_current, self._releases_dir, live.id, chosen)
            )

    async def _write_link(self, write: Callable[[], None]) -> None:
        """Call `write` in the thread `_link_writer`. Waits at most `barrier_seconds`; if the disk
        hangs, the write goes on after that. Raises SwapStopped if the write fails or takes too
        long."""
        written = asyncio.get_running_loop().run_in_executor(self._link_writer, write)
        link, limit = self._releases_dir / release_store.CURRENT, self._settings.barrier_seconds
        try:
            # Without `shield`, the time limit would cancel a write that has not begun.
            await bounded(asyncio.shield(written), limit)
        except TimeoutError:
            raise SwapStopped("failed", f"{link}: not written within {limit:g} s") from None
        except (OSError, ReleaseError) as error:
            raise SwapStopped("failed", f"{link}: {error}") from None

    def _unlink(self, folder: Path) -> None:
        """Remove `current` if it leads to `folder`."""
        if release_store.served_release(self._releases_dir) == folder:
            (self._releases_dir / release_store.CURRENT).unlink()

    async def _restore_previous(self, swap: SwapAttempt, previous: LiveRelease | None) -> None:
        """Make the engine and the link `current` use `previous` again."""
        with suppress(SwapStopped):
            if previous is None:
                if not swap.was_live:
                    await self._write_link(partial(self._unlink, swap.folder))
                return
            try:
                await bounded(self._engine.commit(previous.id), self._commit_seconds)
            except Exception:
                logger.critical(
                    "the engine failed to use %s again after a swap that failed",
                    previous.id,
                    exc_info=True,
                )
            if previous.folder.parent == self._releases_dir:
                await self._record(swap, previous)

    def _begin_retiring(self, release_id: str) -> None:
        self._retiring[release_id] = asyncio.create_task(self._retire(release_id))

    async def _retire(self, release_id: str) -> None:
        await self._admission.drained(release_id)
        await self._unload(release_id)
        self._retiring.pop(release_id, None)

    async def _all_retired(self) -> None:
        if retiring := set(self._retiring.values()):
            # Use `wait`: if this wait is cancelled, `gather` would also cancel the tasks.
            await asyncio.wait(retiring)

    async def _unload(self, release_id: str) -> None:
        try:
            await bounded(self._engine.unload(release_id), self._settings.barrier_seconds)
        except Exception:
            logger.exception("the engine failed to unload %s", release_id)

    @property
    def _commit_seconds(self) -> float:
        return self._engine.commit_seconds or self._settings.barrier_seconds
