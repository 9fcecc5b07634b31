"""`TorchEngine`: holds two releases in memory during a swap, and generates with either of them. Its
`StepLoop` owns the one thread that computes. All other code submits sequences to this thread and
receives their steps."""

import asyncio
import atexit
import contextlib
import ctypes
import fcntl
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from serving.engine import EngineError, Generation, Step
from serving.engines.settings import TorchEngineSettings
from serving.engines.torch_engine.grammars import Grammars
from serving.engines.torch_engine.scheduler import Event, Scheduler
from serving.engines.torch_engine.sequence import EngineSequence
from serving.engines.torch_engine.slots import Runner
from serving.engines.torch_engine.staging import Loader, UnitPool, load_runner
from serving.weights.release import Release, choose_dtype

_log = logging.getLogger(__name__)

_LONG_STEP_SECONDS = 1.0
_COMPUTING_SHARE = 0.01
"""A step that takes longer than `_LONG_STEP_SECONDS` does not count as hanging while its thread
gets at least this share of a core."""

# While requests run, staging pauses this many seconds for each second of work. Staging runs on the
# core that the steps leave free, and the event loop needs this core too, to read requests and write
# answers.
_PAUSE_SHARE_BESIDE_REQUESTS = 1.0

_MAX_FAILED_STEPS = 8
"""After so many failed steps in a row, the engine reports a failure. Some errors never end."""
_LOCK_CHECK_SECONDS = 0.1


def create_engine(**settings: Any) -> "TorchEngine":
    """An engine that holds no release yet. `TorchEngineSettings` explains the arguments. Raises
    ValidationError for an invalid setting."""
    return TorchEngine(TorchEngineSettings(**settings))


@dataclass(kw_only=True, slots=True)
class Resident:
    """A release in memory."""

    vocab_size: int
    context: int
    """The largest number of tokens in a sequence, prompt included."""
    is_unloading: bool = False


class TorchEngine:
    """Call all methods but `dtype_of` on one event loop. The engine computes on a second thread and
    loads releases on a third."""

    holds_two = True

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
            num_threads=settings.num_threads, busy_lock_file=settings.busy_lock_file
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
            self._steps.raise_failure()
            self._steps.is_core_reserved = True
            try:
                runner = await self._load(release, folder)
            finally:
                self._steps.is_core_reserved = False
            self._steps.add(release.id, Scheduler(runner, self._settings))
            self.residents[release.id] = Resident(
                vocab_size=runner.vocab_size, context=runner.cache_size.context
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

    async def generate(self, release_id: str, generation: Generation) -> AsyncGenerator[Step, None]:
        """Compiles the grammar, if there is one, before it submits the sequence.

        The release stays in memory until the sequence ends. If the iterator is closed, the next
        step of the engine frees the slot of the sequence. Raises EngineError if the release is not
        staged, or if the prompt does not fit.
        """
        resident = self._find(release_id)
        if len(generation.prompt) > resident.context:  # the server has checked requests and probes
            raise EngineError(
                f"a prompt of {len(generation.prompt)} tokens does not fit; the release takes "
                f"{resident.context}"
            )
        sequence = EngineSequence(release_id, generation, asyncio.get_running_loop())
        if generation.grammar is not None:
            assert generation.tokenizer is not None
            sequence.logits_processor.grammar = await self._grammars.begin(
                generation.tokenizer, resident.vocab_size, generation.grammar
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
        await asyncio.to_thread(self._steps.close)
        await asyncio.to_thread(self._loader.shutdown)
        await asyncio.to_thread(self._grammars.close)

    def _find(self, release_id: str) -> Resident:
        try:
            return self.residents[release_id]
        except KeyError:
            raise EngineError(f"release {release_id} is not staged") from None

    def _forget(self, release_id: str) -> None:
        del self.residents[release_id]
        self._has_unloaded.set()

    async def _load(self, release: Release, folder: Path) -> Runner:
        is_unwanted = threading.Event()
        loader = Loader(
            release=release,
            folder=folder,
            pool=self._pool,
            settings=self._settings,
            promised_bytes=self._steps.untouched_bytes,
            dtype=getattr(torch, self.dtype_of(release)),
            is_cancelled=is_unwanted.is_set,
            pause_share=lambda: _PAUSE_SHARE_BESIDE_REQUESTS if self._steps.is_busy else 0.0,
        )
        loading = asyncio.get_running_loop().run_in_executor(self._loader, load_runner, loader)
        try:
            return await asyncio.shield(loading)
        except asyncio.CancelledError:
            is_unwanted.set()
            # The next release is staged on the same thread, after this work has stopped. The
            # callback takes the exception, so that asyncio does not log it as never retrieved.
            loading.add_done_callback(lambda done: done.exception())
            raise


class StepLoop:
    """All methods may be called from any thread. All but `close` return at once, and raise
    EngineError if the thread has ended. `add` does its work itself; what the others ask for is done
    by the thread, between two steps.

    The loop lets each scheduler compute one step, then the next scheduler. So after a swap, the
    sequences of the old release end while those of the new release already run.
    """

    def __init__(self, *, num_threads: int | None, busy_lock_file: Path | None) -> None:
        self._num_threads = num_threads
        self._busy_lock = BusyLock(busy_lock_file)
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        self._ending = threading.Lock()
        """While it is held, `_failure` does not change."""
        self._failure: EngineError | None = None
        """Why the thread has ended."""
        self._schedulers: dict[str, Scheduler] = {}
        self._unloading: dict[str, Future[list[Scheduler]]] = {}
        self._num_failed_steps = 0
        """The number of steps that have failed since the last one that did not."""
        self._cpu_clock: int | None = None
        self.is_core_reserved = False
        """Whether steps use one thread less, so that another thread has a core. If steps used all
        cores, each of their operations would wait for the core that the other thread occupies."""
        self._is_stopping = False
        self._is_ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="torch-engine", daemon=True)
        self._thread.start()
        self._is_ready.wait()
        # The interpreter must not shut down while the thread computes.
        atexit.register(self.close)

    @property
    def is_busy(self) -> bool:
        return any(not scheduler.is_idle for scheduler in list(self._schedulers.values()))

    @property
    def kv_cache_usage(self) -> float:
        """The share of the KV cache that running sequences use. Each release has a KV cache of its
        own; this is the share of the fullest one."""
        return max((each.kv_cache_usage for each in list(self._schedulers.values())), default=0.0)

    @property
    def failure(self) -> str | None:
        """The error that ended the thread, or that many steps in a row have failed. None while
        there is neither."""
        if self._failure is not None:
            return str(self._failure)
        if self._num_failed_steps >= _MAX_FAILED_STEPS:
            return f"the last {self._num_failed_steps} steps failed; the log has the errors"
        return None

    @property
    def untouched_bytes(self) -> int:
        """The memory that the KV caches may still take."""
        return sum(scheduler.untouched_bytes for scheduler in list(self._schedulers.values()))

    @property
    def cpu_seconds(self) -> float:
        """The processor time that the thread has used. 0 if the system does not tell, or if the
        thread has ended."""
        if self._cpu_clock is None or self._failure is not None:
            return 0.0
        return time.clock_gettime(self._cpu_clock)

    def next_turn(self) -> Future[None]:
        """A future that the thread completes before its next step."""
        return self._call(self.raise_failure)

    def add(self, release_id: str, scheduler: Scheduler) -> None:
        with self._ending:
            self.raise_failure()
            self._schedulers[release_id] = scheduler

    def unload(self, release_id: str) -> Future[list[Scheduler]]:
        """Remove the release's scheduler as soon as it is idle.

        The result is a list with the only reference to the scheduler. It takes long to free a
        scheduler, because the system must free each of its pages. So clear the list on a thread for
        which nobody waits. The list is empty if the thread ends before.
        """
        removed: Future[list[Scheduler]] = Future()
        self._call(partial(self._unloading.__setitem__, release_id, removed))
        return removed

    def submit(self, sequence: EngineSequence) -> None:
        """The sequence gets an EngineError if its release is not loaded or is being unloaded."""
        self._call(partial(self._submit, sequence))

    def close(self) -> None:
        """Stop the thread and wait for its end. Every sequence ends with EngineError."""
        self._is_stopping = True
        with contextlib.suppress(EngineError):
            self.next_turn()
        self._thread.join()
        atexit.unregister(self.close)

    def _call(self, work: Callable[[], Any]) -> Future[Any]:
        """Let the thread do `work` before its next step."""
        future: Future[Any] = Future()
        with self._ending:
            self.raise_failure()
            self._calls.put((future, work))
        return future

    def raise_failure(self) -> None:
        """Raises EngineError if the thread has ended."""
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        reason = "the engine was closed"
        if hasattr(time, "pthread_getcpuclockid"):  # not on macOS
            self._cpu_clock = time.pthread_getcpuclockid(threading.get_ident())
        try:
            # torch sets a thread's number of threads at the thread's first operation, to 1 while
            # another thread has lowered the default (`lower_thread_priority`). So ask now, before a
            # release can be staged.
            num_threads = self._num_threads or torch.get_num_threads()
            torch.set_num_threads(num_threads)
            self._is_ready.set()
            with torch.inference_mode():
                while not self._is_stopping:
                    usable = max(1, num_threads - self.is_core_reserved - self._busy_lock.is_held)
                    if usable != torch.get_num_threads():
                        torch.set_num_threads(usable)
                    self._step_every_scheduler()
                    self._remove_unloaded()
                    self._do_calls(may_wait=not self.is_busy)
        except BaseException as error:
            reason = f"the engine's thread died: {error!r}"
            _log.critical(reason, exc_info=True)
        finally:
            self._end(EngineError(reason))
            self._is_ready.set()

    def _do_calls(self, *, may_wait: bool = False) -> None:
        """Do the work of all calls. With `may_wait`, wait for one if there is none."""
        while may_wait or not self._calls.empty():
            future, work = self._calls.get()
            may_wait = False
            if not future.set_running_or_notify_cancel():
                continue  # nobody waits any more
            try:
                future.set_result(work())
            except EngineError as error:
                future.set_exception(error)

    def _submit(self, sequence: EngineSequence) -> None:
        release_id = sequence.release_id
        if release_id in self._schedulers and release_id not in self._unloading:
            self._schedulers[release_id].submit(sequence)
        else:
            _deliver([(sequence, EngineError(f"release {release_id} is not staged"))])

    def _step_every_scheduler(self) -> None:
        every = list(self._schedulers.items())  # another thread may add one meanwhile
        schedulers = [(id, each) for id, each in every if not each.is_idle]
        for release_id, scheduler in schedulers:
            try:
                events = scheduler.step(num_schedulers=len(schedulers))
                self._num_failed_steps = 0
            except Exception as error:
                self._num_failed_steps += 1
                _log.exception("a step of release %s failed", release_id)
                failure = EngineError(f"a step of release {release_id} failed: {error}")
                events = scheduler.fail(failure)
            # The sequences of one release do not wait for the step of the other.
            _deliver(events)

    def _remove_unloaded(self) -> None:
        for release_id in [each for each in self._unloading if self._schedulers[each].is_idle]:
            self._unloading.pop(release_id).set_result([self._schedulers.pop(release_id)])

    def _end(self, error: EngineError) -> None:
        with self._ending:
            self._failure = error
        self._do_calls()
        for scheduler in self._schedulers.values():
            _deliver(scheduler.fail(error))
        self._schedulers.clear()
        for removed in self._unloading.values():
            removed.set_result([])


def _deliver(events: list[Event]) -> None:
    """Put each event into the queue of its sequence. Wakes the event loop only once."""
    if events and not (loop := events[0][0].loop).is_closed():
        loop.call_soon_threadsafe(_put, events)


def _put(events: list[tuple[EngineSequence, Step | EngineError]]) -> None:
    for sequence, event in events:
        sequence.events.put_nowait(event)


class BusyLock:
    """Tells whether other programs on this machine compute. They hold a lock on a file meanwhile
    (flock(2)). Use it from one thread only. Without a file, the lock is never held.

    The engine then leaves one core to them. If a step used every core, each of its operations would
    wait for the thread whose core another program occupies.
    """

    def __init__(self, lock: Path | None) -> None:
        self._lock = lock
        self._is_held = False
        self._next_check = 0.0

    @property
    def is_held(self) -> bool:
        """Whether a program held the lock at the last check, at most 0.1 seconds ago."""
        if self._lock is not None and time.monotonic() >= self._next_check:
            self._is_held = _is_locked(self._lock)
            self._next_check = time.monotonic() + _LOCK_CHECK_SECONDS
        return self._is_held


def _is_locked(lock: Path) -> bool:
    try:
        with lock.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False  # no program has created the file, or the file system has no locks
    return False


def return_unused_memory() -> None:
    """Return to the system what glibc keeps after a release is unloaded: unused pages of the heap
    between those that are still in use. Another malloc is left alone."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
