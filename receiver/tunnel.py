"""Keeps a receiver reachable at a public URL through a tunnel.

A *link* is one process, such as `ssh -R`, that makes the receiver reachable at one URL. A tunnel is
a series of links: the tunnel starts another link when a link breaks, and also shortly before the
lifetime of a link ends.

From `Tunnel.open` to `Tunnel.close`, everyone can reach the receiver. The caller must check that
this is allowed.
"""

import contextlib
import logging
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from receiver.errors import TunnelFailed
from receiver.tunnel_command import TunnelCommand, ending_with_this_process

_logger = logging.getLogger(__name__)

START_SECONDS = 30.0
"""If a link has not printed its URL after this time, the tunnel ends the link."""
STEADY_SECONDS = 60.0
"""If a link breaks after it has lasted longer than this, the next link is started at once. If a
link breaks earlier, the tunnel waits before it starts the next link: 1 s at first. Each further
wait is twice the last wait, up to `LONGEST_PAUSE_SECONDS`. The time that was needed to open the
link counts too."""
LONGEST_PAUSE_SECONDS = 60.0
"""The longest pause between two tries to open a link, and between two calls of `on_url`."""
RENEWED_EARLY = 1 / 24
"""The share of a link's lifetime that is left when the tunnel starts the next link."""


@dataclass(frozen=True, kw_only=True)
class PublicUrl:
    url: str
    """The URL without a slash at the end."""
    ends_at: float
    """When the URL expires, in seconds since the epoch. The tunnel starts another link before this
    time."""


class Tunnel:
    """Keeps a link open from the call of `open` to the call of `close`. If a link breaks, opens
    another link.

    Args:
        command: A function that returns the command of a new link. The function's argument is a
            former URL that the link should get again, or None if the link may get any URL.
        lifetime_seconds: How long the provider of the tunnel keeps a link open.
        on_url: Called in the tunnel's thread with the URL of each new link, before the former link
            is ended. If `on_url` returns False, the tunnel calls it again later with the same URL.
    """

    def __init__(
        self,
        command: Callable[[str | None], TunnelCommand],
        *,
        lifetime_seconds: float,
        on_url: Callable[[str], bool],
    ) -> None:
        self._command = command
        self._lifetime_seconds = lifetime_seconds
        self._on_url = on_url
        self._public: PublicUrl | None = None
        self._error: TunnelFailed | None = None
        self._is_open = threading.Event()
        self._is_closing = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._supervise, name="tunnel", daemon=True)

    @property
    def public(self) -> PublicUrl | None:
        """The URL of the latest link. None until the first link has printed its URL."""
        return self._public

    def open(self) -> PublicUrl:
        """Start the tunnel, and wait for the URL of its first link. Raises `TunnelFailed` if the
        user's configuration is wrong. If the first link prints no URL, raises `TunnelFailed` with
        the output of the link."""
        self._command(None)  # raises `TunnelFailed` if the user's configuration is wrong
        self._thread.start()
        try:
            self._is_open.wait()
        except BaseException:
            # In a notebook, the process lives on after Ctrl-C, and so would the thread and its
            # tunnel.
            self.close()
            raise
        if self._public is None:
            raise self._error or TunnelFailed("The tunnel's thread failed; the log says why.")
        return self._public

    def close(self) -> None:
        """End the tunnel. May be called more than once."""
        self._is_closing = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    def _supervise(self) -> None:
        try:
            self._keep_open()
        finally:
            self._is_open.set()

    def _keep_open(self) -> None:
        current: _Link | None = None
        pause = 1.0
        while not self._is_closing:
            # If `current` is None and there was a link before, that link broke: ask for its URL
            # again. If `current` is a link, its lifetime ends soon. It is normally still open and
            # occupies its URL, so ask for any URL. (After a failed try to replace it, `current` may
            # have broken. The next link gets another URL in this case too.)
            former = None if current is not None or self._public is None else self._public.url
            began = time.monotonic()
            try:
                link = self._open_link(former)
            except TunnelFailed as error:
                if self._public is None:
                    self._error = error
                    break
                if self._is_closing:
                    break
                _logger.warning(
                    "The tunnel cannot be opened; next try in %.0f s. %s", *(pause, error)
                )
                self._pause(pause)
                pause = min(pause * 2, LONGEST_PAUSE_SECONDS)
                continue
            url = str(link.url)
            self._public = PublicUrl(url=url, ends_at=time.time() + self._lifetime_seconds)
            if self._is_open.is_set():
                _logger.warning("The public URL is %s", url)
            is_accepted = self._on_url(url)
            if current is not None:
                current.end()
            current = link
            self._is_open.set()
            self._watch(current, is_accepted)
            if not current.is_alive:
                current.end()
                current = None
                if not self._is_closing:
                    _logger.warning(
                        "The tunnel broke and is opened again. Its last output: %s",
                        link.last_output,
                    )
            if time.monotonic() - began > STEADY_SECONDS:
                pause = 1.0
            elif current is None:
                self._pause(pause)
                pause = min(pause * 2, LONGEST_PAUSE_SECONDS)
        if current is not None:
            current.end()

    def _open_link(self, former: str | None) -> "_Link":
        """Start a link, and wait for its URL. Ask for the URL `former`, if there is one. If the
        link does not get `former`, ask for any URL, because the provider may still reserve `former`
        for the broken link. Raises `TunnelFailed`."""
        if former is not None:
            try:
                return self._start_link(former)
            except TunnelFailed:
                if self._is_closing:
                    raise
        return self._start_link(None)

    def _start_link(self, url: str | None) -> "_Link":
        try:
            link = _Link(self._command(url), self._wake)
        # For example, the machine has no room for another process (OSError) or for another thread
        # (RuntimeError).
        except (OSError, RuntimeError) as error:
            raise TunnelFailed(f"The command of the tunnel cannot be started: {error}.") from error
        if self._url_of(link) is None:
            link.end()
            raise TunnelFailed(
                "The command of the tunnel printed no public URL. Its last output:"
                f" {link.last_output}"
            )
        return link

    def _url_of(self, link: "_Link") -> str | None:
        deadline = time.monotonic() + START_SECONDS
        while link.url is None and link.is_alive and not self._is_closing:
            if time.monotonic() > deadline:
                return None
            self._wait(deadline - time.monotonic())
        return link.url if link.is_alive else None

    def _watch(self, link: "_Link", is_accepted: bool) -> None:
        """Wait until the link breaks, until it is time to start the next link, or until the tunnel
        is closed.

        `is_accepted` says whether `on_url` has returned True for the URL of this link. If not, this
        method calls `on_url` again and again, after pauses that get longer.
        """
        assert self._public is not None
        renew_at = self._public.ends_at - self._lifetime_seconds * RENEWED_EARLY
        pause = 1.0
        while link.is_alive and not self._is_closing and (left := renew_at - time.time()) > 0:
            if is_accepted:
                # Wait at most 60 s, and then read the clock again. While a laptop sleeps, the wait
                # does not advance, so one long wait would end too late.
                self._wait(min(left, 60.0))
            else:
                self._wait(min(left, pause))
                pause = min(pause * 2, LONGEST_PAUSE_SECONDS)
                is_accepted = self._on_url(self._public.url)

    def _pause(self, seconds: float) -> None:
        """Wait, but return at once when the tunnel is closed."""
        until = time.monotonic() + seconds
        while not self._is_closing and (left := until - time.monotonic()) > 0:
            self._wait(left)

    def _wait(self, seconds: float) -> None:
        """Wait at most `seconds`. Return earlier if a link prints its URL, if the output of a link
        ends, or if the tunnel is closed."""
        self._wake.wait(max(seconds, 0))
        self._wake.clear()


class _Link:
    """One process of the tunnel. The link sets the event `wake` when the process prints the URL,
    and when the output of the process ends. The output normally ends together with the process."""

    def __init__(self, command: TunnelCommand, wake: threading.Event) -> None:
        self.url: str | None = None
        self._command = command
        self._wake = wake
        self._lines: deque[str] = deque(maxlen=5)
        self._process = subprocess.Popen(
            ending_with_this_process(command.arguments),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            # Give the process its own session. Otherwise Ctrl-C would end the tunnel at once, while
            # the receiver still answers its last requests.
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, name="tunnel-output", daemon=True)
        self._has_ended = False
        try:
            self._reader.start()
        except RuntimeError:
            with self._process:  # waits for the process, and closes its output
                self._process.kill()
            raise

    @property
    def is_alive(self) -> bool:
        return not self._has_ended

    @property
    def last_output(self) -> str:
        """The last lines of the process's output."""
        return " | ".join(self._lines) or "the process printed nothing"

    def end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        # Wait at most 1 s for the end of the output, because a child of the process may keep the
        # output open.
        self._reader.join(1)
        with contextlib.suppress(OSError):
            if self._process.stdout is not None and not self._reader.is_alive():
                self._process.stdout.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            text = line.strip()
            if self._command.is_worth_reading(text):
                self._lines.append(text[:300])
            if self.url is None and (url := self._command.url_in(text)) is not None:
                self.url = url
                self._wake.set()
        self._has_ended = True
        self._wake.set()
