"""`VllmEngine`: one vLLM, whose weights are replaced while its requests are held back.

When vLLM dies, requests under way fail, later ones wait, and it is started again on the last good
release: the live one, or while a swap is not proved yet, the one before. Such a start takes longer
than a barrier may be shut, so it is generations that wait for it, never a commit.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from serving.engine import EngineError, Generation, StageError, Step
from serving.engines.dtype import Dtype, choose_dtype
from serving.engines.same_network import config_differences, tensor_differences
from serving.engines.vllm_settings import VllmEngineSettings
from serving.weights.release import Release
from serving.weights.verify import verify_shards

if TYPE_CHECKING:
    from serving.engines.vllm_process import VllmProcess

_log = logging.getLogger(__name__)

StartVllm = Callable[[Release, Path, VllmEngineSettings], Awaitable["VllmProcess"]]

_WATCH_SECONDS = 0.2
_START_ATTEMPTS = 3


@dataclass(frozen=True, kw_only=True)
class _Resident:
    release: Release
    folder: Path


class VllmEngine:
    """Called on one event loop; vLLM computes in processes of its own."""

    holds_two = False
    checks_digests = True
    commit_seconds: float | None = None

    def __init__(self, settings: VllmEngineSettings, start: StartVllm) -> None:
        self._settings = settings
        self._start = start
        self._dtype: Dtype | None = None
        """What vLLM computes in. A swap does not change it. None until vLLM has started once."""
        self._process: VllmProcess | None = None
        self._residents: dict[str, _Resident] = {}
        self._live: str | None = None
        """What was committed last, and generations may name."""
        self._good: str | None = None
        """What vLLM is started on again. It is behind `_live` from a commit until the release
        before is unloaded, since until then the new one is not proved."""
        self._changing = asyncio.Lock()
        self._recovery: asyncio.Task[None] | None = None
        self._watch: asyncio.Task[None] | None = None

    @property
    def process(self) -> "VllmProcess | None":
        """The vLLM that runs now, for who measures it."""
        return self._process

    @property
    def failure(self) -> str | None:
        if self._good is None or (self._process is not None and not self._process.is_dead):
            return None
        return f"vLLM died; it is started again on {self._good}"

    async def take_turn(self) -> None:
        """Starts and swaps have time limits of their own, and a dead vLLM is started again here."""
        process = self._process
        if process is None or process.is_dead:
            self._begin_recovery()
        elif not self._changing.locked():
            with suppress(EngineError):  # it died, which the engine sees by itself
                await process.take_turn()

    async def stage(self, release: Release, folder: Path) -> None:
        """The first release starts vLLM."""
        async with self._changing:
            if self._process is None and self._recovery is None:
                self._process = await self._start_on(release, folder)
                self._watch = asyncio.create_task(self._watch_process())
            else:
                process = await self._running_process()
                if not process.holds(release.id):
                    _check_same_network(self._residents[process.release_id], release, folder)
                    await process.stage(release, folder)
            self._residents[release.id] = _Resident(release=release, folder=folder)

    def dtype_of(self, release: Release) -> Dtype:
        if self._dtype is not None:
            return self._dtype
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
        return choose_dtype(self._settings.dtype, device_type, release)

    def max_context(self, release_id: str) -> int | None:
        return self._settings.max_context

    async def commit(self, release_id: str) -> None:
        """The way back succeeds at once, whatever state vLLM is in: it comes back on that."""
        if release_id == self._good:
            self._live = release_id
            if self._ensure_recovery():
                return
        async with self._changing:
            process = await self._running_process()
            if not process.holds(release_id):
                raise EngineError(f"{release_id} is not staged")
            if process.way == "reload" and release_id == self._good != process.release_id:
                # vLLM's own reload has no way back but a start.
                self._begin_recovery()
                return
            try:
                await process.commit(release_id)
            except BaseException:
                # The weights may be anything now.
                self._begin_recovery()
                raise
            self._live = release_id
            if self._good is None:
                self._good = release_id

    async def unload(self, release_id: str) -> None:
        if self._residents.pop(release_id, None) is None:
            return
        if release_id == self._good:
            self._good = self._live if self._live in self._residents else None
        if release_id == self._live:
            self._live = None
        process = self._process
        if process is None:
            return
        if self._good is None:
            await self._end_process()
        elif process.release_id == release_id:
            self._begin_recovery()
        else:
            with suppress(EngineError):  # of a dead one nothing is left to free
                await process.forget(release_id)

    async def generate(self, release_id: str, generation: Generation) -> AsyncGenerator[Step, None]:
        if release_id != self._good and self._ensure_recovery():
            raise EngineError(f"vLLM died; it comes back on {self._good}, not on {release_id}")
        process = await self._running_process()
        if release_id != self._live or process.release_id != release_id:
            raise EngineError(f"vLLM computes with {process.release_id}, not with {release_id}")
        async with aclosing(process.generate(generation)) as steps:
            async for step in steps:
                yield step

    async def close(self) -> None:
        if self._recovery is not None:
            self._recovery.cancel()
            await asyncio.wait({self._recovery})
        await self._end_process()

    def _ensure_recovery(self) -> bool:
        """Start a dead vLLM again, one that gave up as well. Whether it is on its way back."""
        if self._process is None or self._process.is_dead:
            self._begin_recovery()
        return self._recovery is not None

    async def _running_process(self) -> "VllmProcess":
        """Waits while vLLM comes back. Raises EngineError if it does not."""
        if self._ensure_recovery() and self._recovery is not None:
            await asyncio.shield(self._recovery)
        if self._process is None:
            raise EngineError("vLLM does not run")
        return self._process

    async def _start_on(self, release: Release, folder: Path) -> "VllmProcess":
        """One attempt, `start_seconds` at most. Raises StageError, EngineError."""
        limit = self._settings.start_seconds
        try:
            async with asyncio.timeout(limit):
                if reasons := await asyncio.to_thread(_find_faults, release, folder):
                    raise StageError(*reasons)
                dtype = self.dtype_of(release)
                settings = self._settings.model_copy(update={"dtype": dtype})
                process = await self._start(release, folder, settings)
                self._dtype = dtype
                return process
        except TimeoutError:
            raise StageError(f"vLLM did not start on {release.id} in {limit:g} s") from None

    def _begin_recovery(self) -> None:
        if self._recovery is None and self._good is not None:
            self._recovery = asyncio.create_task(self._recover())
            self._recovery.add_done_callback(_log_failed_recovery)

    async def _recover(self) -> None:
        try:
            for attempt in range(1, _START_ATTEMPTS + 1):
                await self._end_process()
                if self._good is None:
                    return
                good = self._residents[self._good]
                _log.warning("starting vLLM again on %s", good.release.id)
                try:
                    self._process = await self._start_on(good.release, good.folder)
                except (StageError, EngineError) as error:
                    _log.error("attempt %d of %d: %s", attempt, _START_ATTEMPTS, error)
                    continue
                # It may have been decided meanwhile that another one is good.
                if self._good == good.release.id:
                    self._watch = asyncio.create_task(self._watch_process())
                    return
            raise EngineError(f"vLLM does not start again on {self._good}")
        finally:
            self._recovery = None

    async def _watch_process(self) -> None:
        while self._process is not None and not self._process.is_dead:
            await asyncio.sleep(_WATCH_SECONDS)
        self._begin_recovery()

    async def _end_process(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        process, self._process = self._process, None
        if process is not None:
            await process.end()


def create_engine(**settings: Any) -> VllmEngine:
    """An engine with no release yet. `VllmEngineSettings` says what the arguments mean."""
    # Here, since it imports vLLM, which is slow and not installed everywhere.
    from serving.engines.vllm_process import VllmProcess

    return VllmEngine(VllmEngineSettings(**settings), VllmProcess.start)


def _find_faults(release: Release, folder: Path) -> Sequence[str]:
    """vLLM starts on what it reads by itself, and proves nothing of it."""
    from serving.weights.shards import not_finite  # torch, which is slow to import

    return verify_shards(folder, release) or not_finite(release, folder)


def _check_same_network(before: _Resident, release: Release, folder: Path) -> None:
    """vLLM runs one network for as long as it runs. Raises StageError with every difference."""
    reasons = [
        *config_differences(before.folder, folder, "vLLM"),
        *tensor_differences(before.release, release, "vLLM"),
    ]
    if reasons:
        raise StageError(*reasons, "start the server again to serve another network")


def _log_failed_recovery(recovery: "asyncio.Task[None]") -> None:
    if not recovery.cancelled() and recovery.exception() is not None:
        _log.critical("%s", recovery.exception())
