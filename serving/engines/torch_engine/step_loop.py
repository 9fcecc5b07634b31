"""`StepLoop`: owns the one thread that computes. All other code submits sequences to this thread
and receives their steps."""

import atexit
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import torch

from serving.engine import EngineError, Step
from serving.engines.machine import BusyLock
from serving.engines.torch_engine.scheduler import Event, Scheduler
from serving.engines.torch_engine.sequence import EngineSequence

_log = logging.getLogger(__name__)

_MAX_FAILED_STEPS = 8
"""After so many failed steps in a row, the engine reports a failure. Some errors never end."""


OnUnloaded = Callable[[list[Scheduler]], None]


class StepLoop:
    """All methods may be called from any thread. All but `join` return at once.

    The loop lets each scheduler compute one step, then the next scheduler. So after a swap, the
    sequences of the old release end while those of the new release already run.
    """

    def __init__(self, *, num_threads: int | None, busy_lock: BusyLock) -> None:
        self._num_threads = num_threads
        self._busy_lock = busy_lock
        self._changed = threading.Condition()
        self._submitted: deque[EngineSequence] = deque()
        self._schedulers: dict[str, Scheduler] = {}
        self._unloading: dict[str, OnUnloaded] = {}
        self._num_failed_steps = 0
        """The number of steps that have failed since the last one that did not."""
        self._turns: list[Future[None]] = []
        """The futures that `next_turn` has returned and that are not completed yet."""
        self._cpu_clock: int | None = None
        self._is_core_reserved = False
        self._is_stopping = False
        self._failure: EngineError | None = None
        self._is_ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="torch-engine", daemon=True)
        self._thread.start()
        self._is_ready.wait()
        # The interpreter must not shut down while the thread computes.
        atexit.register(self._stop_at_exit)

    @property
    def is_busy(self) -> bool:
        return bool(self._submitted) or any(
            not scheduler.is_idle for scheduler in list(self._schedulers.values())
        )

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
        """A future that the thread completes before its next step. Raises EngineError if the thread
        has ended."""
        turn: Future[None] = Future()
        with self._changed:
            if self._failure is not None:
                raise self._failure
            self._turns.append(turn)
            self._changed.notify()
        return turn

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

    def add(self, release_id: str, scheduler: Scheduler) -> None:
        """Raises EngineError if the thread has ended."""
        with self._changed:
            if self._failure is not None:
                raise self._failure
            self._schedulers[release_id] = scheduler
            self._changed.notify()

    def unload(self, release_id: str, on_unloaded: OnUnloaded) -> None:
        """Remove the release's scheduler as soon as it is idle, then call `on_unloaded`. The call
        is made on the loop's thread, or on the calling thread if the loop's thread has ended.

        The argument of the call is a list with the only reference to the scheduler. It takes long
        to free a scheduler, because the system must free each of its pages. So clear the list on a
        thread for which nobody waits.
        """
        with self._changed:
            if self._failure is None:
                self._unloading[release_id] = on_unloaded
                self._changed.notify()
                return
        on_unloaded([])

    def submit(self, sequence: EngineSequence) -> None:
        """Raises EngineError if the thread has ended, or if the release is not loaded or is being
        unloaded."""
        with self._changed:
            if self._failure is not None:
                raise self._failure
            release_id = sequence.release_id
            if release_id not in self._schedulers or release_id in self._unloading:
                raise EngineError(f"release {release_id} is not resident")
            self._submitted.append(sequence)
            self._changed.notify()

    def stop(self) -> None:
        """Stop the thread. Every sequence ends with EngineError. `join` waits for the end."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify()

    def join(self) -> None:
        self._thread.join()
        atexit.unregister(self._stop_at_exit)

    def _stop_at_exit(self) -> None:
        self.stop()
        self._thread.join()

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
                while self._wait_for_work():
                    usable = max(1, num_threads - self._is_core_reserved - self._busy_lock.is_held)
                    if usable != torch.get_num_threads():
                        torch.set_num_threads(usable)
                    self._step_every_scheduler()
                    self._remove_unloaded()
        except BaseException as error:
            reason = f"the engine's thread died: {error!r}"
            _log.critical(reason, exc_info=True)
        finally:
            self._end(EngineError(reason))
            self._is_ready.set()

    def _wait_for_work(self) -> bool:
        """Wait until there is a step to compute. Returns False if the loop must stop."""
        with self._changed:
            self._complete_turns()
            while not (self._is_stopping or self._unloading or self.is_busy):
                self._changed.wait()
                self._complete_turns()
            while self._submitted:
                sequence = self._submitted.popleft()
                self._schedulers[sequence.release_id].submit(sequence)
            return not self._is_stopping

    def _complete_turns(self, error: EngineError | None = None) -> None:
        for turn in self._turns:
            if not turn.set_running_or_notify_cancel():
                continue  # nobody waits any more
            if error is None:
                turn.set_result(None)
            else:
                turn.set_exception(error)
        self._turns.clear()

    def _step_every_scheduler(self) -> None:
        with self._changed:
            schedulers = [
                (id, scheduler)
                for id, scheduler in self._schedulers.items()
                if not scheduler.is_idle
            ]
        for release_id, scheduler in schedulers:
            try:
                events = list(scheduler.step(num_schedulers=len(schedulers)))
                self._num_failed_steps = 0
            except Exception as error:
                self._num_failed_steps += 1
                _log.exception("a step of release %s failed", release_id)
                failure = EngineError(f"a step of release {release_id} failed: {error}")
                events = list(scheduler.fail(failure))
            # The sequences of one release do not wait for the step of the other.
            _deliver(events)

    def _remove_unloaded(self) -> None:
        with self._changed:
            # A sequence may have been submitted after this step began.
            wanted = {sequence.release_id for sequence in self._submitted}
            unloaded: list[tuple[OnUnloaded, list[Scheduler]]] = []
            for release_id in list(self._unloading):
                if release_id not in wanted and self._schedulers[release_id].is_idle:
                    removed = [self._schedulers.pop(release_id)]
                    unloaded.append((self._unloading.pop(release_id), removed))
        for on_unloaded, removed in unloaded:
            on_unloaded(removed)

    def _end(self, error: EngineError) -> None:
        with self._changed:
            self._failure = error
            events: list[Event] = [(sequence, error) for sequence in self._submitted]
            for scheduler in self._schedulers.values():
                events.extend(scheduler.fail(error))
            self._submitted.clear()
            self._schedulers.clear()
            unloaded = list(self._unloading.values())
            self._unloading.clear()
            self._complete_turns(error)
        _deliver(events)
        for on_unloaded in unloaded:
            on_unloaded([])


def _deliver(events: list[Event]) -> None:
    """Put each event into the queue of its sequence. Wakes the event loop only once."""
    if events and not (loop := events[0][0].loop).is_closed():
        loop.call_soon_threadsafe(_put, events)


def _put(events: list[tuple[EngineSequence, Step | EngineError]]) -> None:
    for sequence, event in events:
        sequence.events.put_nowait(event)
