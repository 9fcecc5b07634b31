"""`VllmEngine`: runs one vLLM. A swap replaces its weights while no request runs.

If vLLM dies, running requests fail and later ones wait. vLLM is started again on the last good
release. This is the live release, or the one before if a swap is not finished yet. A start takes
longer than requests may be held back during a swap, so a rollback does not wait for it.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from serving.dtype import Dtype, choose_dtype
from serving.engine import EngineError, Generation, StageError, Step
from serving.engines.same_network import config_differences, tensor_differences
from serving.engines.vllm_settings import VllmEngineSettings
from serving.errors import ReleaseError
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
    """All methods must be called on one event loop. vLLM computes in its own processes."""

    holds_two = False
    checks_digests = True
    commit_seconds: float | None = None

    def __init__(self, settings: VllmEngineSettings, start: StartVllm) -> None:
        self._settings = settings
        self._start = start
        self._dtype: Dtype | None = None
        """The dtype in which vLLM computes. It stays the same until vLLM is started again. None
        before the first start."""
        self._process: VllmProcess | None = None
        self._residents: dict[str, _Resident] = {}
        self._live: str | None = None
        """The release that was committed last. Generations may name it."""
        self._good: str | None = None
        """The release on which a dead vLLM is started again. After a commit, it is still the
        release before, until that one is unloaded. Only then is the new one proved."""
        self._changing = asyncio.Lock()
        self._recovery: asyncio.Task[None] | None = None
        self._watch: asyncio.Task[None] | None = None

    @property
    def kv_cache_usage(self) -> float:
        return 0.0 if self._process is None else self._process.kv_cache_usage

    @property
    def process(self) -> "VllmProcess | None":
        """The current vLLM, for measurements."""
        return self._process

    @property
    def failure(self) -> str | None:
        if self._good is None or (self._process is not None and not self._process.is_dead):
            return None
        return f"vLLM died; it is started again on {self._good}"

    async def take_turn(self) -> None:
        """Waits only if vLLM runs and no swap is in progress, because starts and swaps have their
        own time limits. Starts a dead vLLM again."""
        process = self._process
        if process is None or process.is_dead:
            self._begin_recovery()
        elif not self._changing.locked():
            with suppress(EngineError):  # vLLM died; `_watch_process` notices this
                await process.take_turn()

    async def stage(self, release: Release, folder: Path) -> None:
        """Starts vLLM if this is the first release. Raises StageError and EngineError."""
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
        """A rollback to the last good release succeeds at once if vLLM is dead or being started,
        because vLLM is started on this release. Any other commit then fails at once, because the
        new vLLM holds no other release. Raises EngineError."""
        if release_id == self._good:
            self._live = release_id
            if self._ensure_recovery():
                return
        elif self._ensure_recovery():
            raise EngineError(
                f"{release_id} is not staged: vLLM died and is started again on {self._good}"
            )
        async with self._changing:
            process = await self._running_process()
            if not process.holds(release_id):
                raise EngineError(f"{release_id} is not staged")
            if process.way == "reload" and release_id == self._good != process.release_id:
                # vLLM's own reload cannot restore old weights, so start it again.
                self._begin_recovery()
                return
            try:
                await process.commit(release_id)
            except BaseException:
                # The weights may now be a mixture of both releases.
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
            with suppress(EngineError):  # a dead vLLM holds nothing that could be freed
                await process.forget(release_id)

    async def generate(self, release_id: str, generation: Generation) -> AsyncGenerator[Step, None]:
        if release_id != self._good and self._ensure_recovery():
            raise EngineError(
                f"vLLM died and is started again on {self._good}, not on {release_id}"
            )
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
        """If vLLM is dead, start it again, even if earlier attempts failed. Returns whether it is
        being started."""
        if self._process is None or self._process.is_dead:
            self._begin_recovery()
        return self._recovery is not None

    async def _running_process(self) -> "VllmProcess":
        """Waits while vLLM is started again. Raises EngineError if the start fails."""
        if self._ensure_recovery() and self._recovery is not None:
            await asyncio.shield(self._recovery)
        if self._process is None:
            raise EngineError("vLLM does not run")
        return self._process

    async def _start_on(self, release: Release, folder: Path) -> "VllmProcess":
        """Make one attempt, which may take `start_seconds`. Raises StageError and EngineError."""
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
                # ReleaseError and OSError: a shard cannot be read, for example.
                except (StageError, EngineError, ReleaseError, OSError) as error:
                    _log.error("attempt %d of %d: %s", attempt, _START_ATTEMPTS, error)
                    continue
                # A rollback or the end of a swap may have changed the good release meanwhile.
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
    """An engine that holds no release yet. `VllmEngineSettings` explains the arguments. Raises
    ValidationError for an invalid setting."""
    # Imported here, because vLLM is slow to import and not always installed.
    from serving.engines.vllm_process import VllmProcess

    return VllmEngine(VllmEngineSettings(**settings), VllmProcess.start)


def _find_faults(release: Release, folder: Path) -> Sequence[str]:
    """Check the release before vLLM starts on it, because vLLM does not check what it reads.
    Returns all faults."""
    from serving.weights.shards import not_finite  # torch, which is slow to import

    return verify_shards(folder, release) or not_finite(release, folder)


def _check_same_network(before: _Resident, release: Release, folder: Path) -> None:
    """vLLM cannot change its network while it runs. Raises StageError with every difference."""
    reasons = [
        *config_differences(before.folder, folder, "vLLM"),
        *tensor_differences(before.release, release, "vLLM"),
    ]
    if reasons:
        raise StageError(*reasons, "start the server again to serve another network")


def _log_failed_recovery(recovery: "asyncio.Task[None]") -> None:
    if not recovery.cancelled() and recovery.exception() is not None:
        _log.critical("%s", recovery.exception())
