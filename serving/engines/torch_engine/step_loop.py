"""`StepLoop`: the one thread that computes. Everything else hands it sequences and gets steps."""

import asyncio
import atexit
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

import torch

from serving.engine import EngineError, Step
from serving.engines.torch_engine.busy_lock import BusyLock
from serving.engines.torch_engine.scheduler import Event, Scheduler
from serving.engines.torch_engine.sequence import Sequence

_log = logging.getLogger(__name__)


class StepLoop:
    """Its methods may be called from any thread, and return at once.

    Lanes take turns, a step each, so an old release ends its sequences beside the new one's.
    """

    def __init__(self, *, num_threads: int | None, busy_lock: BusyLock) -> None:
        self._num_threads = num_threads
        self._busy_lock = busy_lock
        self._changed = threading.Condition()
        self._submitted: deque[Sequence] = deque()
        self._schedulers: dict[str, Scheduler] = {}
        self._cold: Scheduler | None = None
        """The first scheduler, until it is warm: those that follow mostly are of its shape, and streams
        run beside them."""
        self._unloading: dict[str, Callable[[], None]] = {}
        self._liveness_checks: list[asyncio.Future[None]] = []
        self._cpu_clock: int | None = None
        self._is_core_reserved = False
        self._is_stopping = False
        self._failure: EngineError | None = None
        self._is_ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="torch-engine", daemon=True)
        self._thread.start()
        self._is_ready.wait()
        # The interpreter must not go away under a thread that computes.
        atexit.register(self._stop_at_exit)

    @property
    def is_busy(self) -> bool:
        return bool(self._submitted) or any(
            not scheduler.is_idle for scheduler in list(self._schedulers.values())
        )

    @property
    def failure(self) -> str | None:
        """Why the thread is no more."""
        return None if self._failure is None else str(self._failure)

    @property
    def cpu_seconds(self) -> float | None:
        """The processor time that the thread has used; None where the system does not tell."""
        if self._cpu_clock is None or self._failure is not None:
            return None
        return time.clock_gettime(self._cpu_clock)

    def add_liveness_check(self, check: "asyncio.Future[None]") -> None:
        """Have the thread end `check` before its next step. Raises EngineError where the thread is
        no more."""
        with self._changed:
            if self._failure is not None:
                raise self._failure
            self._liveness_checks.append(check)
            self._changed.notify()

    @contextlib.contextmanager
    def reserve_core(self) -> Iterator[None]:
        """Steps leave one core to another thread, and do not wait in each of their operations until
        it lets go of theirs."""
        self._is_core_reserved = True
        try:
            yield
        finally:
            self._is_core_reserved = False

    def add(self, release_id: str, scheduler: Scheduler) -> None:
        """Raises EngineError where the thread is no more."""
        with self._changed:
            if self._failure is not None:
                raise self._failure
            if not self._schedulers:
                self._cold = scheduler
            self._schedulers[release_id] = scheduler
            self._changed.notify()

    def unload(self, release_id: str, on_unloaded: Callable[[], None]) -> None:
        """Let a scheduler go once it is idle, and then call `on_unloaded`, on whatever thread that is."""
        with self._changed:
            if self._failure is None:
                self._unloading[release_id] = on_unloaded
                self._changed.notify()
                return
        on_unloaded()

    def cancel_unload(self, release_id: str) -> bool:
        """Take `retire` back. False where the scheduler is unloaded already."""
        with self._changed:
            self._unloading.pop(release_id, None)
            return release_id in self._schedulers

    def submit(self, sequence: Sequence) -> None:
        """Raises EngineError where the thread is no more, or never had the release."""
        with self._changed:
            if self._failure is not None:
                raise self._failure
            if sequence.release_id not in self._schedulers or sequence.release_id in self._unloading:
                raise EngineError(f"release {sequence.release_id} is not resident")
            self._submitted.append(sequence)
            self._changed.notify()

    def stop(self) -> None:
        """End every sequence with EngineError and every scheduler. `join` waits for it."""
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
            # A thread that has not asked yet gets its number at its first operation, and that is 1
            # while another one makes itself small to stage.
            num_threads = self._num_threads or torch.get_num_threads()
            torch.set_num_threads(num_threads)
            self._is_ready.set()
            with torch.inference_mode():
                while self._wait_for_work():
                    self._warm_up(num_threads)
                    left = max(1, num_threads - self._is_core_reserved - self._busy_lock.is_held)
                    if left != torch.get_num_threads():
                        torch.set_num_threads(left)
                    self._step_every_scheduler()
                    self._remove_unloaded()
        except BaseException as error:
            reason = f"the engine's thread died: {error!r}"
            _log.critical(reason, exc_info=True)
        finally:
            self._end(EngineError(reason))
            self._is_ready.set()

    def _wait_for_work(self) -> bool:
        """False when there is to be no more."""
        with self._changed:
            self._answer_liveness_checks(None)
            while not (
                self._is_stopping
                or self._submitted
                or self._unloading
                or self._cold
                or self._is_running()
            ):
                self._changed.wait()
                self._answer_liveness_checks(None)
            while self._submitted:
                sequence = self._submitted.popleft()
                self._schedulers[sequence.release_id].submit(sequence)
            return not self._is_stopping

    def _warm_up(self, num_threads: int) -> None:
        with self._changed:
            scheduler, self._cold = self._cold, None
        if scheduler is None:
            return
        # A kernel is one for so many threads, and while a release is staged, or others compute,
        # there is one less.
        for left in {max(1, num_threads - 1), num_threads}:
            torch.set_num_threads(left)
            try:
                scheduler.warm_up()
            except Exception:
                # Nobody waits for this; what is wrong with the steps they say themselves.
                _log.exception("the engine could not be warmed up")

    def _answer_liveness_checks(self, error: EngineError | None) -> None:
        for check in self._liveness_checks:
            loop = check.get_loop()
            if not loop.is_closed():
                loop.call_soon_threadsafe(_answer_liveness_check, check, error)
        self._liveness_checks.clear()

    def _is_running(self) -> bool:
        return any(not scheduler.is_idle for scheduler in self._schedulers.values())

    def _step_every_scheduler(self) -> None:
        with self._changed:
            schedulers = [
                (id, scheduler)
                for id, scheduler in self._schedulers.items()
                if not scheduler.is_idle
            ]
        events: list[Event] = []
        for release_id, scheduler in schedulers:
            try:
                events.extend(scheduler.step(num_schedulers=len(schedulers)))
            except Exception as error:
                _log.exception("a step of release %s failed", release_id)
                failure = EngineError(f"a step of release {release_id} failed: {error}")
                events.extend(scheduler.fail(failure))
        _deliver(events)

    def _remove_unloaded(self) -> None:
        with self._changed:
            # A sequence that was handed in since keeps its scheduler.
            wanted = {sequence.release_id for sequence in self._submitted}
            unloaded = []
            for release_id in list(self._unloading):
                if release_id not in wanted and self._schedulers[release_id].is_idle:
                    del self._schedulers[release_id]
                    unloaded.append(self._unloading.pop(release_id))
        for on_unloaded in unloaded:
            on_unloaded()

    def _end(self, error: EngineError) -> None:
        with self._changed:
            self._failure = error
            events: list[Event] = [(sequence, error) for sequence in self._submitted]
            for scheduler in self._schedulers.values():
                events.extend(scheduler.fail(error))
            self._submitted.clear()
            self._schedulers.clear()
            self._cold = None
            unloaded = list(self._unloading.values())
            self._unloading.clear()
            self._answer_liveness_checks(error)
        _deliver(events)
        for on_unloaded in unloaded:
            on_unloaded()


def _answer_liveness_check(check: "asyncio.Future[None]", error: EngineError | None) -> None:
    if check.done():  # nobody waits for it any more
        return
    if error is None:
        check.set_result(None)
    else:
        check.set_exception(error)


def _deliver(events: list[Event]) -> None:
    """Hand events over, once per event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Event]] = {}
    for event in events:
        by_loop.setdefault(event[0].loop, []).append(event)
    for loop, its_events in by_loop.items():
        if not loop.is_closed():
            loop.call_soon_threadsafe(_put, its_events)


def _put(events: list[tuple[Sequence, Step | EngineError]]) -> None:
    for sequence, event in events:
        sequence.events.put_nowait(event)
