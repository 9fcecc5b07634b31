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
from serving.engines.torch_engine.lane import Event, Lane
from serving.engines.torch_engine.neighbours import Neighbours
from serving.engines.torch_engine.sequence import Sequence

_log = logging.getLogger(__name__)


class StepLoop:
    """Its methods may be called from any thread, and return at once.

    Lanes take turns, a step each, so an old release ends its sequences beside the new one's.
    """

    def __init__(self, *, num_threads: int | None, neighbours: Neighbours) -> None:
        self._num_threads = num_threads
        self._neighbours = neighbours
        self._changed = threading.Condition()
        self._submitted: deque[Sequence] = deque()
        self._lanes: dict[str, Lane] = {}
        self._cold: Lane | None = None
        """The first lane, until it is warm: those that follow mostly are of its shape, and streams
        run beside them."""
        self._leaving: dict[str, Callable[[], None]] = {}
        self._turns: list[asyncio.Future[None]] = []
        self._cpu_clock: int | None = None
        self._is_lending = False
        self._is_stopping = False
        self._death: EngineError | None = None
        self._is_ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="torch-engine", daemon=True)
        self._thread.start()
        self._is_ready.wait()
        # The interpreter must not go away under a thread that computes.
        atexit.register(self._stop_at_exit)

    @property
    def is_busy(self) -> bool:
        return bool(self._submitted) or any(not lane.is_idle for lane in list(self._lanes.values()))

    @property
    def death(self) -> str | None:
        """Why the thread is no more."""
        return None if self._death is None else str(self._death)

    @property
    def cpu_seconds(self) -> float | None:
        """The processor time that the thread has used; None where the system does not tell."""
        if self._cpu_clock is None or self._death is not None:
            return None
        return time.clock_gettime(self._cpu_clock)

    def give_turn(self, turn: "asyncio.Future[None]") -> None:
        """Have the thread end `turn` before its next step. Raises EngineError where the thread is
        no more."""
        with self._changed:
            if self._death is not None:
                raise self._death
            self._turns.append(turn)
            self._changed.notify()

    @contextlib.contextmanager
    def lending_a_core(self) -> Iterator[None]:
        """Steps leave one core to another thread, and do not wait in each of their operations until
        it lets go of theirs."""
        self._is_lending = True
        try:
            yield
        finally:
            self._is_lending = False

    def add(self, release_id: str, lane: Lane) -> None:
        """Raises EngineError where the thread is no more."""
        with self._changed:
            if self._death is not None:
                raise self._death
            if not self._lanes:
                self._cold = lane
            self._lanes[release_id] = lane
            self._changed.notify()

    def retire(self, release_id: str, on_gone: Callable[[], None]) -> None:
        """Let a lane go once it is idle, and then call `on_gone`, on whatever thread that is."""
        with self._changed:
            if self._death is None:
                self._leaving[release_id] = on_gone
                self._changed.notify()
                return
        on_gone()

    def keep(self, release_id: str) -> bool:
        """Take `retire` back. False where the lane is gone already."""
        with self._changed:
            self._leaving.pop(release_id, None)
            return release_id in self._lanes

    def submit(self, sequence: Sequence) -> None:
        """Raises EngineError where the thread is no more, or never had the release."""
        with self._changed:
            if self._death is not None:
                raise self._death
            if sequence.release_id not in self._lanes or sequence.release_id in self._leaving:
                raise EngineError(f"release {sequence.release_id} is not resident")
            self._submitted.append(sequence)
            self._changed.notify()

    def stop(self) -> None:
        """End every sequence with EngineError and every lane. `join` waits for it."""
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
                    left = max(1, num_threads - self._is_lending - self._neighbours.are_at_work)
                    if left != torch.get_num_threads():
                        torch.set_num_threads(left)
                    self._step_every_lane()
                    self._let_go()
        except BaseException as error:
            reason = f"the engine's thread died: {error!r}"
            _log.critical(reason, exc_info=True)
        finally:
            self._end(EngineError(reason))
            self._is_ready.set()

    def _wait_for_work(self) -> bool:
        """False when there is to be no more."""
        with self._changed:
            self._end_turns(None)
            while not (
                self._is_stopping
                or self._submitted
                or self._leaving
                or self._cold
                or self._is_running()
            ):
                self._changed.wait()
                self._end_turns(None)
            while self._submitted:
                sequence = self._submitted.popleft()
                self._lanes[sequence.release_id].submit(sequence)
            return not self._is_stopping

    def _warm_up(self, num_threads: int) -> None:
        with self._changed:
            lane, self._cold = self._cold, None
        if lane is None:
            return
        # A kernel is one for so many threads, and while a release is staged, or others compute,
        # there is one less.
        for left in {max(1, num_threads - 1), num_threads}:
            torch.set_num_threads(left)
            try:
                lane.warm_up()
            except Exception:
                # Nobody waits for this; what is wrong with the steps they say themselves.
                _log.exception("the engine could not be warmed up")

    def _end_turns(self, error: EngineError | None) -> None:
        for turn in self._turns:
            loop = turn.get_loop()
            if not loop.is_closed():
                loop.call_soon_threadsafe(_end_turn, turn, error)
        self._turns.clear()

    def _is_running(self) -> bool:
        return any(not lane.is_idle for lane in self._lanes.values())

    def _step_every_lane(self) -> None:
        with self._changed:
            lanes = [(id, lane) for id, lane in self._lanes.items() if not lane.is_idle]
        events: list[Event] = []
        for release_id, lane in lanes:
            try:
                events.extend(lane.step(num_lanes=len(lanes)))
            except Exception as error:
                _log.exception("a step of release %s failed", release_id)
                failure = EngineError(f"a step of release {release_id} failed: {error}")
                events.extend(lane.fail(failure))
        _deliver(events)

    def _let_go(self) -> None:
        with self._changed:
            # A sequence that was handed in since keeps its lane.
            wanted = {sequence.release_id for sequence in self._submitted}
            gone = []
            for release_id in list(self._leaving):
                if release_id not in wanted and self._lanes[release_id].is_idle:
                    del self._lanes[release_id]
                    gone.append(self._leaving.pop(release_id))
        for on_gone in gone:
            on_gone()

    def _end(self, error: EngineError) -> None:
        with self._changed:
            self._death = error
            events: list[Event] = [(sequence, error) for sequence in self._submitted]
            for lane in self._lanes.values():
                events.extend(lane.fail(error))
            self._submitted.clear()
            self._lanes.clear()
            self._cold = None
            gone = list(self._leaving.values())
            self._leaving.clear()
            self._end_turns(error)
        _deliver(events)
        for on_gone in gone:
            on_gone()


def _end_turn(turn: "asyncio.Future[None]", error: EngineError | None) -> None:
    if turn.done():  # nobody waits for it any more
        return
    if error is None:
        turn.set_result(None)
    else:
        turn.set_exception(error)


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
