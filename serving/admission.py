"""`Admission`: which release a request is answered by, and the barrier in front of a switch.

A request enters once and keeps the release that it was given until it leaves, whatever is switched
meanwhile. Runs on the event loop's thread only; never touches an engine.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from serving.tokenizer import ReleaseTokenizer
from serving.weights.release import Release


@dataclass(frozen=True, kw_only=True)
class Unserved:
    """The release that should be served, and why it is not."""

    id: str
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.id} cannot be served: {'; '.join(self.reasons)}"


@dataclass(frozen=True, kw_only=True, eq=False)
class LiveRelease:
    """A release that requests can be answered by, with what the server needs of it."""

    release: Release
    folder: Path
    tokenizer: ReleaseTokenizer
    live_since: int
    """Unix seconds."""
    stands_in_for: Unserved | None = None
    """Set if this older release is served because the chosen one cannot be."""
    engine_context: int | None = None
    """Tokens that the engine has room for; None for all that the release allows."""

    @property
    def id(self) -> str:
        return self.release.id

    @property
    def context_length(self) -> int:
        """Prompt and new tokens together, at most."""
        allowed = self.tokenizer.context_length
        return allowed if self.engine_context is None else min(allowed, self.engine_context)


class QueueFull(Exception):
    """As many requests as allowed are being answered or wait."""


class NothingServed(Exception):
    """No release was ever live here."""


class Admission:
    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._live: LiveRelease | None = None
        self._num_waiting = 0
        self._in_flight: Counter[str] = Counter()
        self._open = asyncio.Event()
        self._open.set()
        self._left = asyncio.Event()
        self.unserved: Unserved | None = None
        """What was served last, if it cannot be, and nothing else was live since the start."""
        self.is_stopping = False
        """The server was told to stop: what is being answered ends, nothing new begins."""
        self.previous: str | None = None
        """What was live before, for who wants to roll back."""

    @property
    def live(self) -> LiveRelease | None:
        return self._live

    @property
    def is_closed(self) -> bool:
        return not self._open.is_set()

    def is_used(self, release_id: str) -> bool:
        """Whether a request is still answered by this release."""
        return release_id in self._in_flight

    @property
    def num_waiting(self) -> int:
        return self._num_waiting

    @property
    def num_in_flight(self) -> int:
        return self._in_flight.total()

    async def enter(self) -> LiveRelease:
        """The release for one request, which must `leave` it. Waits while the barrier is closed.

        Raises QueueFull and NothingServed.
        """
        if self.num_in_flight + self.num_waiting >= self._max_requests:
            raise QueueFull
        self._num_waiting += 1
        try:
            while not self._open.is_set():
                await self._open.wait()
        finally:
            self._num_waiting -= 1
        if self._live is None:
            raise NothingServed
        self._in_flight[self._live.id] += 1
        return self._live

    def leave(self, live: LiveRelease) -> None:
        self._in_flight[live.id] -= 1
        if not self._in_flight[live.id]:
            del self._in_flight[live.id]
        self._left.set()

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Hold new requests back. Everything awaited inside must be bounded in time."""
        self._open.clear()
        try:
            yield
        finally:
            self._open.set()

    def switch(self, live: LiveRelease) -> None:
        """From now on requests enter on `live`."""
        if self._live is not None and self._live.id != live.id:
            self.previous = self._live.id
        self._live = live

    async def drained(self, release_id: str) -> None:
        """Until no request is answered by this release."""
        while release_id in self._in_flight:
            self._left.clear()
            await self._left.wait()
