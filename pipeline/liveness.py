"""Finds out whether a service answers, and whether a child process of the stack (a service that
`pipeline up` started) works or hangs. For each child, a thread asks again and again whether the
child works. Each of these questions is called a probe."""

import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import httpx

Answer = Literal["works", "silent", "dead", "unknown"]
"""What a probe found out. `works`: the child answered. `silent`: the child gave no answer. `dead`:
the child answered that it cannot work any more and must be restarted. `unknown`: the child may
work, but has no way to answer."""
LivenessProbe = Callable[[float], Answer]
"""A function that asks the child once. It waits for the child's answer for at most the given number
of seconds."""

PROBE_INTERVAL_SECONDS = 5.0
"""The longest time from one probe to the next, and the longest time that a probe waits for its
answer."""
MIN_PROBES_PER_HANG = 6
"""A child counts as hung after `hang_seconds` without an answer. If `hang_seconds` is short, the
interval between probes gets shorter, so that the child gets at least this many probes within
`hang_seconds`."""


class ChildWatch:
    """Watches one child process until `stop` is called.

    Until its first answer, the child may be silent for `start_seconds`. After its first answer, it
    may be silent for `hang_seconds`.

    The planned time between two probes is called the interval. If a probe gets no answer, the time
    from this probe to the next probe is added to the child's silent time, but at most two intervals
    are added. Without this limit, a pause of our own process, for example while the machine sleeps,
    would count as silence of the child, and the child would be killed.
    """

    def __init__(self, probe: LivenessProbe, *, start_seconds: float, hang_seconds: float) -> None:
        self._probe = probe
        self._start_seconds = start_seconds
        self._hang_seconds = hang_seconds
        self._interval = min(PROBE_INTERVAL_SECONDS, hang_seconds / MIN_PROBES_PER_HANG)
        self._has_answered = False
        self._is_dead = False
        self._silent_seconds = 0.0
        self._stop = threading.Event()
        threading.Thread(target=self._watch, name="child-watch", daemon=True).start()

    @property
    def has_stopped_answering(self) -> bool:
        """True if the child has answered in the past, but has now been silent for two intervals or
        longer."""
        return self._has_answered and self._silent_seconds >= 2 * self._interval

    @property
    def kill_reason(self) -> str | None:
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
            if answer in ("works", "unknown"):
                self._has_answered |= answer == "works"
                self._silent_seconds = 0.0
            self._stop.wait(max(0.0, self._interval - (time.monotonic() - began)))
            if answer == "silent":
                self._silent_seconds += min(time.monotonic() - began, 2 * self._interval)


def http_probe(url: str) -> LivenessProbe:
    """The probe for a service that has a port. It sends `GET /live`. The status 503 means `dead`,
    and any other status means `works`."""

    def probe(seconds: float) -> Answer:
        response = _get(f"{url}/live", seconds)
        if response is None:
            return "silent"
        return "dead" if response.status_code == 503 else "works"

    return probe


def file_probe(file: Path) -> LivenessProbe:
    """The probe for a service that has no port, but touches `file` again and again while it works.

    The answer is `works` if the file's modification time has changed since the last probe. If the
    time has not changed, or if the file does not exist, the probe tries to touch the file itself.
    If this succeeds, the answer is `silent`. If it fails, for example because the file system is
    read-only, the service cannot touch the file either, and the answer is `unknown`.
    """

    def touched_at() -> int | None:
        try:
            return file.stat().st_mtime_ns
        except OSError:
            return None

    seen = touched_at()

    def probe(_: float) -> Answer:
        nonlocal seen
        before, seen = seen, touched_at()
        if seen is not None and seen != before:
            return "works"
        try:
            file.touch()
        except OSError:
            return "unknown"
        seen = touched_at()
        return "silent"

    return probe


def port_fault(url: str) -> str | None:
    """Why no service can listen on the host and port of `url`; None if a service can listen
    there."""
    address = httpx.URL(url)
    with socket.socket(socket.AF_INET6 if ":" in address.host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address.host, address.port or 80))
        except OSError as error:
            return error.strerror or str(error)
    return None


def server_state(url: str) -> dict[str, Any]:
    """The answer of the completion server at `url` to `GET /health`. Empty if nothing answers, or
    if the answer is not a JSON object. If another program listens there and answers with a JSON
    object, returns this object."""
    response = health(url)
    try:
        answer = None if response is None else response.json()
    except ValueError:  # another program listens on the port
        return {}
    return answer if isinstance(answer, dict) else {}


def health(url: str) -> httpx.Response | None:
    """The service's answer to `GET /health`, whatever its status; None if no answer comes in 5 s.

    The status does not matter here: a completion server that serves no release answers 503,
    although the service is up.
    """
    return _get(f"{url}/health", 5)


def _get(url: str, seconds: float) -> httpx.Response | None:
    try:
        # These URLs are plain HTTP. `verify=False` saves time: otherwise httpx would load all
        # certificate authorities for each request.
        return httpx.get(url, timeout=seconds, trust_env=False, verify=False)
    except httpx.HTTPError:
        return None
