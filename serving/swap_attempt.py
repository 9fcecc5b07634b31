"""The state of one swap, the exception that ends a swap, and time limits for its steps."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Iterator
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
    """One swap: what was requested, and how far it has come."""

    folder: Path
    is_recorded: bool
    """Whether the swap writes the link `current`. False for a folder that was named at the start of
    the server."""
    was_live: bool = False
    """Whether the release was live before the server started. If so, the link `current` to it stays
    even if this swap fails."""
    stands_in_for: Unserved | None = None
    """If the release of this swap is a substitute: the release that could not be served. Otherwise
    None."""
    phase: SwapPhase = "preflight"
    seconds: dict[str, float] = field(default_factory=dict)
    superseded_by: str | None = None
    """The id of the release of the newest swap. This swap then ends, unless its commit has begun
    (the phase in which the engine begins to use the new weights)."""
    max_difference: float | None = None
    """The largest difference between a log-probability of the engine and the log-probability in the
    release's probe; None if they were not compared."""

    @property
    def release_id(self) -> str:
        return self.folder.name

    @contextmanager
    def timed(self, phase: SwapPhase) -> Iterator[None]:
        """Sets the phase, and adds the time of the `with` block to the time of the phase."""
        self.phase = phase
        started = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - started
            self.seconds[phase] = self.seconds.get(phase, 0.0) + spent

    def stop_if_superseded(self) -> None:
        """Raise SwapStopped if a newer swap was requested."""
        if self.superseded_by is not None:
            raise SwapStopped("superseded", f"a swap to {self.superseded_by} was requested later")

    def ended(
        self,
        result: Literal["live", "refused", "superseded", "deferred", "failed"],
        previous: str | None,
        *reasons: str,
    ) -> SwapResult:
        """The result of a swap that has ended. `previous` is the id of the release that was live
        before the swap."""
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
    """Ends a swap. The release that was live before is still live."""

    def __init__(
        self, result: Literal["refused", "superseded", "deferred", "failed"], *reasons: str
    ) -> None:
        self.result = result
        self.reasons = reasons


async def bounded(work: Awaitable[T], seconds: float) -> T:
    """The result of `work`. If `work` takes longer than `seconds`, cancels it and raises
    TimeoutError at once. Does not wait for the end of `work`, because it may ignore the
    cancellation."""
    task = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
    except asyncio.CancelledError:
        task.cancel()
        raise
    if not done:
        task.cancel()
        task.add_done_callback(_log_late_error)
        raise TimeoutError
    return task.result()


def _log_late_error(task: "asyncio.Future[Any]") -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.error("a step of a swap failed after its time limit: %s", task.exception())
