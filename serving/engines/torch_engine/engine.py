"""`TorchEngine`: holds two releases in memory during a swap, and generates with either of them."""

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from serving.engine import EngineError, Generation, StageError, Step
from serving.engines.machine import BusyLock, return_unused_memory
from serving.engines.settings import TorchEngineSettings
from serving.engines.torch_engine.grammars import Grammars
from serving.engines.torch_engine.loading import Loader, UnitPool
from serving.engines.torch_engine.runner import Runner
from serving.engines.torch_engine.scheduler import Scheduler
from serving.engines.torch_engine.sequence import EngineSequence
from serving.engines.torch_engine.staging import load_runner
from serving.engines.torch_engine.step_loop import StepLoop
from serving.errors import ReleaseError
from serving.weights.release import Release, choose_dtype

_LONG_STEP_SECONDS = 1.0
_COMPUTING_SHARE = 0.01
"""A step that takes longer than `_LONG_STEP_SECONDS` does not count as hanging while its thread
gets at least this share of a core."""

# While requests run, staging pauses this many seconds for each second of work. Staging runs on the
# core that the steps leave free, and the event loop needs this core too, to read requests and write
# answers.
_PAUSE_SHARE_BESIDE_REQUESTS = 1.0


def create_engine(**settings: Any) -> "TorchEngine":
    """An engine that holds no release yet. `TorchEngineSettings` explains the arguments. Raises
    ValidationError for an invalid setting."""
    return TorchEngine(TorchEngineSettings(**settings))


@dataclass(kw_only=True, slots=True)
class Resident:
    """A release in memory."""

    release: Release
    folder: Path
    vocab_size: int
    context: int
    """The largest number of tokens in a sequence, prompt included."""
    read_bytes: int
    """Bytes of the tensors that were read from shards."""
    is_unloading: bool = False


class TorchEngine:
    """All methods must be called on one event loop. The engine computes on a second thread and
    loads releases on a third."""

    holds_two = True
    checks_digests = True
    commit_seconds: float | None = None

    def __init__(self, settings: TorchEngineSettings) -> None:
        self._settings = settings
        self._pool = UnitPool()
        self._grammars = Grammars()
        self.residents: dict[str, Resident] = {}
        """All releases in memory by id, including those that are unloaded after their last sequence
        ends."""
        self._staging = asyncio.Lock()
        self._has_unloaded = asyncio.Event()
        self._loader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="torch-engine-staging")
        self._steps = StepLoop(
            num_threads=settings.num_threads, busy_lock=BusyLock(settings.busy_lock_file)
        )

    @property
    def kv_cache_usage(self) -> float:
        return self._steps.kv_cache_usage

    @property
    def failure(self) -> str | None:
        return self._steps.failure

    async def take_turn(self) -> None:
        turn = asyncio.wrap_future(self._steps.next_turn())
        try:
            while not turn.done():
                before = self._steps.cpu_seconds
                await asyncio.wait({turn}, timeout=_LONG_STEP_SECONDS)
                used = self._steps.cpu_seconds - before
                # A long prompt can be one long step. A thread that hangs uses no processor time.
                if not turn.done() and used > _COMPUTING_SHARE * _LONG_STEP_SECONDS:
                    return
            turn.result()
        finally:
            turn.cancel()

    async def stage(self, release: Release, folder: Path) -> None:
        async with self._staging:
            while any(each.is_unloading for each in self.residents.values()):
                self._has_unloaded.clear()
                await self._has_unloaded.wait()
            if release.id in self.residents:
                return
            with self._steps.reserve_core():
                runner, read_bytes = await self._load(release, folder)
            try:
                self._steps.add(release.id, Scheduler(runner, self._settings))
            except EngineError as error:
                raise StageError(f"release {release.id}: {error}") from error
            self.residents[release.id] = Resident(
                release=release,
                folder=folder,
                vocab_size=runner.vocab_size,
                context=runner.cache_size.context,
                read_bytes=read_bytes,
            )

    def dtype_of(self, release: Release) -> str:
        return choose_dtype(self._settings.dtype, "cpu", release)

    def max_context(self, release_id: str) -> int | None:
        return self._find(release_id).context

    async def commit(self, release_id: str) -> None:
        """Does nothing, because each generation names its release."""

    async def unload(self, release_id: str) -> None:
        """Does nothing if the release is not in memory or is already being unloaded."""
        resident = self.residents.get(release_id)
        if resident is None or resident.is_unloading:
            return
        resident.is_unloading = True
        loop = asyncio.get_running_loop()

        def free(removed: list[Scheduler]) -> None:
            removed.clear()
            try:
                return_unused_memory()
            finally:
                loop.call_soon_threadsafe(self._forget, release_id)

        try:
            unloaded = self._steps.unload(release_id)
        except EngineError:  # the thread has ended, and holds nothing any more
            self._forget(release_id)
        else:
            # Steps and event loop go on meanwhile. The next release is loaded after this.
            unloaded.add_done_callback(lambda done: self._loader.submit(free, done.result()))

    async def generate(self, release_id: str, generation: Generation) -> AsyncIterator[Step]:
        """Compiles the grammar, if there is one, before it submits the sequence.

        The release stays in memory until the sequence ends. If the iterator is closed, the next
        step of the engine frees the slot of the sequence. Raises EngineError if the release is not
        staged, or if the prompt does not fit.
        """
        resident = self._find(release_id)
        if len(generation.prompt) > resident.context:  # a probe is not checked before
            raise EngineError(
                f"a prompt of {len(generation.prompt)} tokens does not fit; the release takes "
                f"{resident.context}"
            )
        sequence = EngineSequence(release_id, generation, asyncio.get_running_loop())
        if generation.grammar is not None:
            sequence.logits_processor.grammar = await self._grammars.begin(
                resident.release, resident.folder, resident.vocab_size, generation.grammar
            )
        self._steps.submit(sequence)
        try:
            while True:
                event = await sequence.events.get()
                if isinstance(event, EngineError):
                    raise event
                yield event
                if event.finish_reason is not None:
                    return
        finally:
            sequence.is_cancelled = True

    async def close(self) -> None:
        self._steps.stop()
        await asyncio.to_thread(self._steps.join)
        await asyncio.to_thread(self._loader.shutdown)
        await asyncio.to_thread(self._grammars.close)

    def _find(self, release_id: str) -> Resident:
        try:
            return self.residents[release_id]
        except KeyError:
            raise EngineError(f"release {release_id} is not resident") from None

    def _forget(self, release_id: str) -> None:
        del self.residents[release_id]
        self._has_unloaded.set()

    async def _load(self, release: Release, folder: Path) -> tuple[Runner, int]:
        """The runner, and the bytes that were read to make it."""
        is_unwanted = threading.Event()
        loader = Loader(
            release=release,
            folder=folder,
            pool=self._pool,
            dtype=getattr(torch, self.dtype_of(release)),
            is_cancelled=is_unwanted.is_set,
            pause_share=lambda: _PAUSE_SHARE_BESIDE_REQUESTS if self._steps.is_busy else 0.0,
        )
        loading = asyncio.get_running_loop().run_in_executor(
            self._loader, load_runner, loader, self._settings, self._steps.untouched_bytes
        )
        try:
            return await asyncio.shield(loading), loader.read_bytes
        except ReleaseError as error:
            raise StageError(*error.reasons) from error
        except asyncio.CancelledError:
            is_unwanted.set()
            # The next release is staged on the same thread, after this work has stopped. The
            # callback takes the exception, so that asyncio does not log it as never retrieved.
            loading.add_done_callback(lambda done: done.exception())
            raise
