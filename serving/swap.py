"""`Swapper`: preflight → stage → barrier → commit → probe → live, or back.

An engine that holds two releases commits and is probed while requests still enter on the old one;
its barrier is the moment in which they are sent to the new one. One that cannot is drained first,
commits and is probed under the barrier. Where the probe fails, the old release is committed again.
Every await under the barrier is bounded, and the barrier opens in a `finally`: no engine, however
stuck, keeps it shut.

One swap at a time and one that waits; a newer request overtakes whatever has not begun to commit.
"""

import asyncio
import logging
import time
from contextlib import suppress
from pathlib import Path
from typing import Literal

from serving.admission import Admission, LiveRelease
from serving.engine import Engine, StageError
from serving.errors import ReleaseError
from serving.metrics import Metrics
from serving.probe import ProbeResult, measure_probe
from serving.settings import ServingSettings
from serving.swap_attempt import SwapAttempt, SwapStopped, bounded
from serving.swap_schemas import SwapResult
from serving.tokenizer import load_tokenizer
from serving.weights import releases
from serving.weights.checkpoint_folder import manifest_of_folder
from serving.weights.release import RELEASE_FILE, Release
from serving.weights.verify import verify_release

logger = logging.getLogger(__name__)


class Swapper:
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
        self._engine = engine
        self._admission = admission
        self._settings = settings
        self._releases_dir = releases_dir
        self._pipeline = pipeline
        self._metrics = metrics
        self._running: SwapAttempt | None = None
        self._waiting: SwapAttempt | None = None
        self._worker: asyncio.Task[None] | None = None
        self._retiring: dict[str, asyncio.Task[None]] = {}
        """Releases that are no longer live, whose last requests are still answered."""

    async def start(self, folder: Path | None = None) -> None:
        """Serve `folder` if given; otherwise what was served last, then what is pending.

        Raises ReleaseError for a `folder` that cannot be served. Without one, a release that cannot
        is logged, and the server waits for one that can.
        """
        if folder is not None:
            result = await self._ask(folder, is_recorded=False)
            if result.result != "live":
                raise ReleaseError(*result.reasons)
            return
        releases.sweep(self._releases_dir)
        try:
            served = releases.served_release(self._releases_dir)
            if served is not None:
                await self._ask(served)
        except ReleaseError as error:
            logger.error("%s: %s", self._releases_dir / releases.CURRENT, error)
        try:
            pending = releases.pending_release(self._releases_dir)
        except ReleaseError as error:
            logger.error("%s: %s", self._releases_dir / releases.PENDING, error)
            return
        if pending is not None:
            await self._ask(self._releases_dir / pending)

    async def swap(self, requested: str) -> SwapResult:
        """Make a release live: an id, or a path under the releases root. A caller that goes away
        does not end the swap."""
        folder = self._releases_dir / requested
        inside = folder.resolve().parent == self._releases_dir.resolve()
        if not inside or folder.resolve().name not in releases.release_ids(self._releases_dir):
            return SwapResult(
                result="refused",
                release=requested,
                previous=self._live_id(),
                phase="preflight",
                reasons=(f"{requested!r} is no release in {self._releases_dir}",),
            )
        return await self._ask(self._releases_dir / folder.resolve().name)

    async def close(self) -> None:
        """End what is under way."""
        tasks = [*self._retiring.values(), *([self._worker] if self._worker else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._waiting is not None:
            self._finish(self._waiting, self._shut_down_result(self._waiting))

    async def _ask(self, folder: Path, *, is_recorded: bool = True) -> SwapResult:
        for known in (self._waiting, self._running):
            if known is not None and known.folder == folder and known.superseded_by is None:
                return await asyncio.shield(known.result)
        swap = SwapAttempt(
            folder=folder,
            is_recorded=is_recorded,
            result=asyncio.get_running_loop().create_future(),
        )
        overtaken = self._waiting
        self._waiting = swap
        if self._running is None:
            self._worker = asyncio.create_task(self._work())
            # So that a request in the same turn of the loop sees a swap that runs.
            self._running, self._waiting = swap, None
        elif not self._running.is_committing:
            self._running.superseded_by = swap.release_id
        if overtaken is not None:
            overtaken.superseded_by = swap.release_id
            await self._clear_pending(overtaken)
            self._finish(overtaken, self._stopped_result(overtaken))
        return await asyncio.shield(swap.result)

    async def _work(self) -> None:
        while self._running is not None:
            swap = self._running
            try:
                result = await self._perform(swap)
            except Exception as error:
                logger.exception("swap to %s", swap.release_id)
                result = self._result(swap, "failed", (f"{type(error).__name__}: {error}",))
            except asyncio.CancelledError:
                self._finish(swap, self._shut_down_result(swap))
                raise
            if result.result != "deferred":
                await self._clear_pending(swap)
            self._finish(swap, result)
            self._running, self._waiting = self._waiting, None

    def _finish(self, swap: SwapAttempt, result: SwapResult) -> None:
        # What becomes of a folder that was named at the start is raised to who named it.
        trouble = logging.WARNING if swap.is_recorded else logging.DEBUG
        level = logging.INFO if result.result == "live" else trouble
        logger.log(
            level,
            "swap to %s: %s in phase %s; %s",
            result.release,
            result.result,
            result.phase,
            "; ".join(result.reasons) or f"before it {result.previous}",
        )
        self._metrics.count_swap(result)
        if not swap.result.done():
            swap.result.set_result(result)

    async def _clear_pending(self, swap: SwapAttempt) -> None:
        """Whatever came of it: a release that cannot be served is not tried at every start."""
        if swap.is_recorded:
            try:
                await asyncio.to_thread(releases.clear_pending, self._releases_dir, swap.release_id)
            except OSError as error:
                logger.error("%s: %s", self._releases_dir / releases.PENDING, error)

    async def _perform(self, swap: SwapAttempt) -> SwapResult:
        previous = self._admission.live
        if previous is not None and previous.folder == swap.folder:
            swap.phase = "live"
            return self._result(swap, "live")
        try:
            candidate = await self._preflight(swap)
            if previous is not None and previous.id == candidate.id:
                swap.phase = "live"
                return self._result(swap, "live")
            await self._stage(swap, candidate)
            try:
                if self._engine.holds_two:
                    await self._switch_beside(swap, candidate, previous)
                else:
                    await self._switch_in_place(swap, candidate, previous)
            except BaseException:
                self._begin_retiring(candidate.id)
                raise
        except SwapStopped as stopped:
            return self._result(swap, stopped.result, stopped.reasons)
        swap.phase = "live"
        if previous is not None:
            self._begin_retiring(previous.id)
        return self._result(swap, "live", previous=previous)

    async def _preflight(self, swap: SwapAttempt) -> LiveRelease:
        with swap.timed("preflight"):
            try:
                release = await asyncio.to_thread(self._check, swap.folder)
                tokenizer = await asyncio.to_thread(load_tokenizer, swap.folder)
            except ReleaseError as error:
                raise SwapStopped("refused", *error.reasons) from None
            except OSError as error:
                raise SwapStopped("refused", f"{swap.folder}: {error}") from None
        swap.stop_if_superseded()
        return LiveRelease(
            release=release,
            folder=swap.folder,
            tokenizer=tokenizer,
            live_since=int(time.time()),
        )

    def _check(self, folder: Path) -> Release:
        if not (folder / RELEASE_FILE).exists():
            return manifest_of_folder(folder, self._pipeline)
        release = releases.load_release(folder)
        reasons = list(verify_release(folder, release))
        if folder.parent == self._releases_dir and folder.name != release.id:
            reasons.append(f"{RELEASE_FILE}: calls itself {release.id}, not {folder.name}")
        dtype = self._settings.dtype
        if release.probe is not None and dtype not in release.probe.bounds:
            reasons.append(
                f"{RELEASE_FILE}: its probe has no bound for {dtype}, in which this server "
                f"computes, only for {', '.join(release.probe.bounds) or 'nothing'}"
            )
        if reasons:
            raise ReleaseError(*reasons)
        return release

    async def _stage(self, swap: SwapAttempt, candidate: LiveRelease) -> None:
        if candidate.id in self._retiring and self._admission.is_used(candidate.id):
            # Still loaded for its last requests: the way back needs no disk.
            self._retiring.pop(candidate.id).cancel()
            swap.phase = "stage"
            return
        with swap.timed("stage"):
            try:
                if self._retiring:
                    await bounded(self._all_retired(), self._settings.drain_seconds)
            except TimeoutError:
                raise SwapStopped(
                    "deferred",
                    f"requests on {', '.join(self._retiring)} did not end within "
                    f"{self._settings.drain_seconds:g} s, and the engine holds no third release",
                ) from None
            swap.stop_if_superseded()
            try:
                await bounded(
                    self._engine.stage(candidate.release, candidate.folder),
                    self._settings.phase_seconds,
                )
            except StageError as error:
                raise SwapStopped("refused", *error.reasons) from None
            except TimeoutError:
                await self._unload(candidate.id)
                raise SwapStopped(
                    "failed", f"staging took more than {self._settings.phase_seconds:g} s"
                ) from None
            except Exception as error:
                await self._unload(candidate.id)
                raise SwapStopped("failed", f"stage: {error}") from error

    async def _switch_beside(
        self, swap: SwapAttempt, candidate: LiveRelease, previous: LiveRelease | None
    ) -> None:
        swap.stop_if_superseded()
        swap.is_committing = True
        try:
            await self._commit(swap, candidate)
            await self._probe(swap, candidate, self._settings.phase_seconds)
            await self._record(swap, candidate.id)
        except BaseException:
            await self._go_back(swap, previous)
            raise
        # One turn of the loop: nobody waits at this barrier.
        with swap.timed("barrier"), self._admission.closed():
            self._admission.switch(candidate)

    async def _switch_in_place(
        self, swap: SwapAttempt, candidate: LiveRelease, previous: LiveRelease | None
    ) -> None:
        with self._admission.closed():
            with swap.timed("barrier"):
                if previous is not None:
                    await self._drain(previous)
                swap.stop_if_superseded()
                swap.is_committing = True
            try:
                await self._commit(swap, candidate)
                await self._probe(swap, candidate, self._settings.barrier_seconds)
                await self._record(swap, candidate.id)
            except BaseException:
                await self._go_back(swap, previous)
                raise
            self._admission.switch(candidate)

    async def _drain(self, previous: LiveRelease) -> None:
        try:
            await bounded(self._admission.drained(previous.id), self._settings.drain_seconds)
        except TimeoutError:
            raise SwapStopped(
                "deferred",
                f"requests on {previous.id} did not end within "
                f"{self._settings.drain_seconds:g} s; ask again",
            ) from None

    async def _commit(self, swap: SwapAttempt, candidate: LiveRelease) -> None:
        with swap.timed("commit"):
            try:
                await bounded(self._engine.commit(candidate.id), self._commit_seconds)
            except TimeoutError:
                raise SwapStopped(
                    "failed", f"commit took more than {self._commit_seconds:g} s"
                ) from None
            except Exception as error:
                raise SwapStopped("failed", f"commit: {error}") from error

    async def _probe(self, swap: SwapAttempt, candidate: LiveRelease, limit_seconds: float) -> None:
        probe = candidate.release.probe
        if probe is None:
            return
        with swap.timed("probe"):
            bound = probe.bounds[self._settings.dtype]
            try:
                found: ProbeResult = await bounded(
                    measure_probe(self._engine, candidate.id, probe, bound), limit_seconds
                )
            except TimeoutError:
                raise SwapStopped("failed", f"probe took more than {limit_seconds:g} s") from None
            except Exception as error:
                raise SwapStopped("failed", f"probe: {error}") from error
        swap.max_difference = found.max_difference
        if found.reasons:
            raise SwapStopped("refused", *found.reasons)

    async def _record(self, swap: SwapAttempt, release_id: str) -> None:
        if not swap.is_recorded:
            return
        try:
            await asyncio.to_thread(releases.set_current, self._releases_dir, release_id)
        except OSError as error:
            raise SwapStopped(
                "failed", f"{self._releases_dir / releases.CURRENT}: {error}"
            ) from None

    async def _go_back(self, swap: SwapAttempt, previous: LiveRelease | None) -> None:
        """Under the barrier: the engine and `current` as they were."""
        if previous is None:
            if releases.served_release(self._releases_dir) == swap.folder:
                (self._releases_dir / releases.CURRENT).unlink()
            return
        try:
            await bounded(self._engine.commit(previous.id), self._commit_seconds)
        except Exception:
            logger.critical("the engine does not go back to %s", previous.id, exc_info=True)
        if swap.is_recorded and previous.folder.parent == self._releases_dir:
            with suppress(SwapStopped):
                await self._record(swap, previous.id)

    def _begin_retiring(self, release_id: str) -> None:
        self._retiring[release_id] = asyncio.create_task(self._retire(release_id))

    async def _retire(self, release_id: str) -> None:
        await self._admission.drained(release_id)
        await self._unload(release_id)
        self._retiring.pop(release_id, None)

    async def _all_retired(self) -> None:
        # Not gather: giving up must not cancel them.
        await asyncio.wait(set(self._retiring.values()))

    async def _unload(self, release_id: str) -> None:
        try:
            await bounded(self._engine.unload(release_id), self._settings.barrier_seconds)
        except Exception:
            logger.exception("unloading %s", release_id)

    @property
    def _commit_seconds(self) -> float:
        return self._engine.commit_seconds or self._settings.barrier_seconds

    def _live_id(self) -> str | None:
        return self._admission.live.id if self._admission.live else None

    def _stopped_result(self, swap: SwapAttempt) -> SwapResult:
        return self._result(swap, "superseded", (f"{swap.superseded_by} was asked for meanwhile",))

    def _shut_down_result(self, swap: SwapAttempt) -> SwapResult:
        return self._result(swap, "failed", ("the server is shutting down",))

    def _result(
        self,
        swap: SwapAttempt,
        result: Literal["live", "refused", "superseded", "deferred", "failed"],
        reasons: tuple[str, ...] = (),
        *,
        previous: LiveRelease | None = None,
    ) -> SwapResult:
        return SwapResult(
            result=result,
            release=swap.release_id,
            previous=previous.id if previous else self._live_id(),
            phase=swap.phase,
            reasons=reasons,
            superseded_by=swap.superseded_by if result == "superseded" else None,
            seconds=swap.seconds,
            probe_max_difference=swap.max_difference,
        )
