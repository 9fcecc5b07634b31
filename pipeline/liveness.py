"""Tells whether a child of the stack works or hangs. A thread asks it again and again."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from pipeline.probes import liveness

Answer = Literal["works", "silent", "dead"]
"""`dead`: the child says itself that it works only after a new start."""
Probe = Callable[[float], Answer]
"""Asks once, and waits at most the given seconds."""

PROBE_SECONDS = 5.0
PROBES_OF_A_HANG = 6
"""At least so many probes are missed before a child counts as hung."""


class Pulse:
    """Watches one process, from its start until `stop`.

    Seconds without an answer are added up probe by probe, and a probe counts for no more than it
    may take. So time in which this process itself did not run, because it was stopped or the
    machine slept, does not make a child look hung.
    """

    def __init__(self, probe: Probe, *, start_seconds: float, hang_seconds: float) -> None:
        self._probe = probe
        self._start_seconds = start_seconds
        self._hang_seconds = hang_seconds
        self._interval = min(PROBE_SECONDS, hang_seconds / PROBES_OF_A_HANG)
        self._has_answered = False
        self._is_dead = False
        self._silent_seconds = 0.0
        self._stop = threading.Event()
        threading.Thread(target=self._watch, name="pulse", daemon=True).start()

    @property
    def is_silent(self) -> bool:
        """Whether a process that has answered before left the last probes unanswered."""
        return self._has_answered and self._silent_seconds >= 2 * self._interval

    @property
    def verdict(self) -> str | None:
        """Why the process must be killed; None as long as it need not be."""
        if self._is_dead:
            return "it said that it works only after a new start"
        limit = self._hang_seconds if self._has_answered else self._start_seconds
        return f"it did not answer for {limit:g} s" if self._silent_seconds >= limit else None

    def stop(self) -> None:
        self._stop.set()

    def _watch(self) -> None:
        while not self._stop.is_set():
            began = time.monotonic()
            answer = self._probe(self._interval)
            self._is_dead = answer == "dead"
            if answer == "works":
                self._has_answered = True
                self._silent_seconds = 0.0
            self._stop.wait(max(0.0, self._interval - (time.monotonic() - began)))
            if answer == "silent":
                self._silent_seconds += min(time.monotonic() - began, 2 * self._interval)


def ask(url: str) -> Probe:
    """A probe of a service that has a port: `GET /live`."""

    def probe(seconds: float) -> Answer:
        response = liveness(url, seconds)
        if response is None:
            return "silent"
        return "dead" if response.status_code == 503 else "works"

    return probe


def look_at(file: Path) -> Probe:
    """A probe of a service that has no port, and touches `file` while it works."""

    def touched() -> int | None:
        try:
            return file.stat().st_mtime_ns
        except OSError:
            return None

    seen = touched()

    def probe(_: float) -> Answer:
        nonlocal seen
        before, seen = seen, touched()
        return "silent" if seen is None or seen == before else "works"

    return probe
