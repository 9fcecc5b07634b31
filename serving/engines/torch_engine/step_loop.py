"""`StepLoop`: owns the one thread that computes. All other code submits sequences to this thread
and receives their steps."""

import atexit
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch

from serving.engine import EngineError, Step
from serving.engines.machine import BusyLock
from serving.engines.torch_engine.scheduler import Event, Scheduler
from serving.engines.torch_engine.sequence import EngineSequence

_log = logging.getLogger(__name__)

_MAX_FAILED_STEPS = 8
"""After so many failed steps in a row, the engine reports a failure. Some errors never end."""


class StepLoop:
    """All methods may be called from any thread. All but `join` return at once. What they ask for
    is done by the thread, between two steps. They raise EngineError if the thread has ended.

    The loop lets each scheduler compute one step, then the next scheduler. So after a swap, the
    sequences of the old release end while those of the new release already run.
    """

    def __init__(self, *, num_threads: int | None, busy_lock: BusyLock) -> None:
        self._num_threads = num_threads
        self._busy_lock = busy_lock
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
        self._is_core_reserved = False
        self._is_stopping = False
        self._is_ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="torch-engine", daemon=True)
        self._thread.start()
        self._is_ready.wait()
        # The interpreter must not shut down while the thread computes.
        atexit.register(self._stop_at_exit)

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

    @contextlib.contextmanager
    def reserve_core(self) -> Iterator[None]:
        """In the `with` block, steps use one thread less, so that another thread has a core. If
        steps used all cores, each of their operations would wait for the core that the other thread
        occupies."""
        self._is_core_reserved = True
        try:
            yield
        finally:
            self._is_core_reserved = False

    def next_turn(self) -> Future[None]:
        """A future that the thread completes before its next step."""
        return self._call(self._raise_failure)

    def add(self, release_id: str, scheduler: Scheduler) -> None:
        with self._ending:
            self._raise_failure()
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

    def stop(self) -> None:
        """Stop the thread. Every sequence ends with EngineError. `join` waits for the end."""
        self._is_stopping = True
        with contextlib.suppress(EngineError):
            self.next_turn()

    def join(self) -> None:
        self._thread.join()
        atexit.unregister(self._stop_at_exit)

    def _stop_at_exit(self) -> None:
        self.stop()
        self._thread.join()

    def _call(self, work: Callable[[], Any]) -> Future[Any]:
        """Let the thread do `work` before its next step."""
        future: Future[Any] = Future()
        with self._ending:
            self._raise_failure()
            self._calls.put((future, work))
        return future

    def _raise_failure(self) -> None:
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
                    usable = max(1, num_threads - self._is_core_reserved - self._busy_lock.is_held)
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
            _deliver([(sequence, EngineError(f"release {release_id} is not resident"))])

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
