"""One swap on its way: where it stands, how it may end, and how long anything in it may take."""

import asyncio
import logging
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from serving.admission import Unserved
from serving.swap_schemas import SwapPhase, SwapResult

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(eq=False, kw_only=True)
class SwapAttempt:
    folder: Path
    is_recorded: bool
    """Whether `current` follows; not for a folder that was named at the start."""
    result: "asyncio.Future[SwapResult]"
    was_live: bool = False
    """Whether it was live before the server's start: the record of that is not taken back."""
    stands_in_for: Unserved | None = None
    phase: SwapPhase = "preflight"
    seconds: dict[str, float] = field(default_factory=dict)
    superseded_by: str | None = None
    is_committing: bool = False
    max_difference: float | None = None

    @property
    def release_id(self) -> str:
        return self.folder.name

    @contextmanager
    def timed(self, phase: SwapPhase) -> Iterator[None]:
        self.phase = phase
        started = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - started
            self.seconds[phase] = self.seconds.get(phase, 0.0) + spent

    def stop_if_superseded(self) -> None:
        if self.superseded_by is not None:
            raise SwapStopped("superseded", f"{self.superseded_by} was asked for meanwhile")

    def succeeded(self, previous: str | None) -> SwapResult:
        """`previous` is what was live before."""
        return self._result("live", previous)

    def stopped(self, stopped: "SwapStopped", live: str | None) -> SwapResult:
        return self._result(stopped.result, live, stopped.reasons)

    def _result(
        self,
        result: Literal["live", "refused", "superseded", "deferred", "failed"],
        previous: str | None,
        reasons: tuple[str, ...] = (),
    ) -> SwapResult:
        return SwapResult(
            result=result,
            release=self.release_id,
            previous=previous,
            phase=self.phase,
            reasons=reasons,
            superseded_by=self.superseded_by if result == "superseded" else None,
            seconds=self.seconds,
            probe_max_difference=self.max_difference,
        )


class SwapStopped(Exception):
    """A swap ends here, and what was served is served."""

    def __init__(
        self, result: Literal["refused", "superseded", "deferred", "failed"], *reasons: str
    ) -> None:
        self.result = result
        self.reasons = reasons


async def bounded(work: Coroutine[Any, Any, T], seconds: float) -> T:
    """Await `work`, but never longer: one that ignores its cancellation is left behind."""
    task = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
    except asyncio.CancelledError:
        task.cancel()
        raise
    if not done:
        task.cancel()
        task.add_done_callback(_forget)
        raise TimeoutError
    return task.result()


def _forget(task: "asyncio.Future[Any]") -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.error("after its time was up: %s", task.exception())
