"""Finds out whether a child process of the stack works or hangs. For each child, a thread asks
again and again whether the child works. One such question is called a probe."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from pipeline.probes import liveness

Answer = Literal["works", "silent", "dead"]
"""`silent`: the child gave no answer. `dead`: the child answered that it cannot work any more and
must be restarted."""
Probe = Callable[[float], Answer]
"""Asks the child once, and waits for its answer for at most the given number of seconds."""

PROBE_SECONDS = 5.0
PROBES_OF_A_HANG = 6
"""A child counts as hung after `hang_seconds` without an answer. The interval between two probes is
PROBE_SECONDS, or shorter, so that the child gets at least this many probes in `hang_seconds`."""


class Pulse:
    """Watches one child process until `stop` is called.

    Before its first answer, the child may be silent for `start_seconds`; after it, for
    `hang_seconds`. To measure the silence, each probe without an answer adds the time until the
    next probe, but at most two intervals. This limit is needed because this process itself may not
    run for a while, for example while the machine sleeps, and the child must not count as hung for
    that reason.
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
        """Whether the child has answered before, but has now been silent for two intervals."""
        return self._has_answered and self._silent_seconds >= 2 * self._interval

    @property
    def verdict(self) -> str | None:
        """Why the child must be killed; None if it need not be killed."""
        if self._is_dead:
            return "it answered that it must be restarted"
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


def http_probe(url: str) -> Probe:
    """The probe for a service that has a port. It sends `GET /live`. The status 503 means `dead`,
    and any other status means `works`."""

    def probe(seconds: float) -> Answer:
        response = liveness(url, seconds)
        if response is None:
            return "silent"
        return "dead" if response.status_code == 503 else "works"

    return probe


def file_probe(file: Path) -> Probe:
    """The probe for a service that has no port, but touches `file` again and again while it works.
    The answer is `silent` if the file's time has not changed since the last probe."""

    def touched_at() -> int | None:
        try:
            return file.stat().st_mtime_ns
        except OSError:
            return None

    seen = touched_at()

    def probe(_: float) -> Answer:
        nonlocal seen
        before, seen = seen, touched_at()
        return "silent" if seen is None or seen == before else "works"

    return probe
