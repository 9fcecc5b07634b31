"""Keeps a receiver reachable at a public URL, and the webhooks on hubs up to date with this URL.

A tunnel is a command that makes the receiver reachable from elsewhere and prints the URL. From
`PublicUrl.open` to `PublicUrl.close`, everyone can reach the receiver. The caller must check that
this is allowed.
"""

import contextlib
import json
import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jobs.folder import read_json, write_by_rename
from receiver.errors import NotAllowed, ReceiverError, TunnelFailed
from receiver.settings import ReceiverSettings
from receiver.webhooks import list_webhooks, update_webhook

_logger = logging.getLogger(__name__)

START_SECONDS = 30.0
"""If the command has not printed a URL after this time, it is ended."""
LONGEST_PAUSE_SECONDS = 60.0
"""The longest pause between two starts of the command, and between two tries to update webhooks.
The first pause is 1 s, and each further one is twice as long. If the command has run for longer
than this, the pauses begin again at 1 s."""

_writing = threading.Lock()
"""Held while the file of the URLs is changed: two threads change it."""


@dataclass(frozen=True, kw_only=True)
class HubCredentials:
    """A hub, and a token that may manage webhooks on this hub. If `endpoint` (the hub's URL) is
    None, the hub is the one in `HF_ENDPOINT` or, if this variable is not set, the Hugging Face Hub.
    If `token` is None, the token that `huggingface_hub` finds is used, such as the token in
    `HF_TOKEN`."""

    endpoint: str | None = None
    token: str | None = field(default=None, repr=False)


class PublicUrl:
    """The public URL of a receiver.

    Args:
        settings: `tunnel_url_pattern` finds the tunnel's URL. Without a tunnel, `public_url` must
            already lead to the receiver.
        remembered: The file that lists the present public URL and the former ones.
        hubs: The hubs whose webhooks are updated when the URL changes.
        tunnel: The command of the tunnel (`command_of`). None to use `public_url` of the settings.
        address: `host:port`, to which the tunnel leads.
    """

    def __init__(
        self,
        settings: ReceiverSettings,
        remembered: Path,
        hubs: Sequence[HubCredentials],
        *,
        tunnel: str | None = None,
        address: str = "",
    ) -> None:
        self.url: str | None = None
        """The present URL, without a slash at the end. None until the tunnel has one."""
        self._settings = settings
        self._remembered = remembered
        self._hubs = hubs
        self._tunnel = tunnel
        self._address = address
        self._has_begun = threading.Event()
        self._is_closing = threading.Event()
        self._moves = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._last_output = ""
        self._threads: list[threading.Thread] = []

    def open(self) -> None:
        """Return when there is a URL. Raises `TunnelFailed` if the configuration is wrong, or if
        the command prints no URL at its first start. Raises OSError if the URL cannot be written
        into the file `remembered`."""
        if self._tunnel is None:
            assert self._settings.public_url is not None
            self._use(self._settings.public_url.rstrip("/"))
        else:
            self._start(self._keep_open, command_of(self._tunnel, self._address))
            try:
                self._has_begun.wait()
            except BaseException:
                # In a notebook, the process lives on after Ctrl-C, and so would the tunnel.
                self.close()
                raise
            if self.url is None:
                raise TunnelFailed(
                    f"The tunnel cannot be opened: its command printed no public URL. Its last"
                    f" output: {self._last_output}"
                )

    def close(self) -> None:
        """End the tunnel. May be called more than once."""
        self._is_closing.set()
        if (process := self._process) is not None:
            _end(process)
        for thread in self._threads:
            thread.join()

    def _start(self, target: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=target, name="public-url", args=args, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _keep_open(self, command: Sequence[str]) -> None:
        pause = 1.0
        while True:
            began = time.monotonic()
            try:
                self._run(command)
            except (OSError, RuntimeError) as error:  # the latter: no thread could be started
                self._last_output = str(error)
            self._has_begun.set()
            if self.url is None or self._is_closing.is_set():
                return
            if time.monotonic() - began > LONGEST_PAUSE_SECONDS:
                pause = 1.0
            _logger.warning(
                "The tunnel has ended, and is opened again in %.0f s. Its last output: %s",
                *(pause, self._last_output),
            )
            if self._is_closing.wait(pause):
                return
            pause = min(pause * 2, LONGEST_PAUSE_SECONDS)

    def _run(self, command: Sequence[str]) -> None:
        """Run the command until it ends, or until `close` is called."""
        lines: deque[str] = deque(["nothing"], maxlen=5)
        url, pattern = None, self._settings.tunnel_url_pattern
        with subprocess.Popen(
            _ending_with_this_process(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            # Give the process its own session. Otherwise Ctrl-C would end the tunnel at once, while
            # the receiver still answers its last requests.
            start_new_session=True,
        ) as process:
            self._process = process
            timer = threading.Timer(START_SECONDS, _end, [process])
            timer.daemon = True
            try:
                timer.start()
                if self._is_closing.is_set():  # `close` may not have seen the process
                    _end(process)
                assert process.stdout is not None
                for line in map(str.strip, process.stdout):
                    if line:
                        lines.append(line[:300])
                    if url is None and (found := re.search(pattern, line)) is not None:
                        url = found[0].rstrip("/")
                        timer.cancel()
                        self._use(url)
            finally:
                timer.cancel()
                self._process = None
                _end(process)
                self._last_output = " | ".join(lines)

    def _use(self, url: str) -> None:
        # First write the URL into the file: `pipeline up` reads it there as soon as the receiver
        # answers.
        remember(url, self._remembered)
        if self._has_begun.is_set():
            _logger.warning("The public URL is %s", url)
        self.url = url
        self._has_begun.set()
        self._start(self._move_webhooks, url)

    def _move_webhooks(self, url: str) -> None:
        pause = 1.0
        with self._moves:  # wait until the thread of an earlier URL has ended
            while self.url == url and not move_webhooks(self._remembered, self._hubs):
                if self._is_closing.wait(pause):
                    return
                pause = min(pause * 2, LONGEST_PAUSE_SECONDS)


def tunnel_to_open(share: bool | str, settings: ReceiverSettings) -> str | None:
    """The tunnel to open; None if none is needed. `share` is the argument of
    `WebhooksServer.launch`. Raises `TunnelFailed` if `share` is True, but neither `tunnel` nor
    `public_url` is set."""
    if isinstance(share, str):
        return share
    if share and settings.tunnel is None and settings.public_url is None:
        raise TunnelFailed(
            "share=True needs a tunnel: pass as `share` a command that prints a public URL, or set"
            " `tunnel` (`pipeline receiver --tunnel`). If senders can reach this server without"
            " one, set `public_url` (`pipeline receiver --public-url`)."
        )
    return settings.tunnel if share else None


def command_of(tunnel: str, address: str) -> list[str]:
    """The command line `tunnel` as a list. In it, `{address}` is replaced by `address`
    (`host:port`), and `{port}` by the port of `address`. Raises `TunnelFailed` if it is not a
    command, or if its program is not installed."""
    filled = tunnel.replace("{address}", address).replace("{port}", address.rpartition(":")[2])
    try:
        command = shlex.split(filled)
    except ValueError as error:
        raise TunnelFailed(f"The tunnel {tunnel!r} is not a command: {error}.") from error
    if not command:
        raise TunnelFailed("The tunnel is empty: set a command that prints a public URL.")
    if shutil.which(command[0]) is None:
        raise TunnelFailed(
            f"The tunnel's program {command[0]!r} is not on PATH: install it, or use another"
            " tunnel."
        )
    return command


def _ending_with_this_process(arguments: Sequence[str]) -> list[str]:
    """A command that runs `arguments`. On Linux, the kernel sends SIGTERM to the command when the
    thread that started the command has ended. So if the receiver is killed, its tunnel ends too. On
    other systems, a killed receiver leaves its tunnel open."""
    if sys.platform != "linux":
        return list(arguments)
    # A new interpreter runs `code`, which calls prctl(PR_SET_PDEATHSIG, SIGTERM), and then replaces
    # the interpreter with the command. Do not use a `preexec_fn` of `subprocess` instead: it would
    # run Python code between fork and exec, which is not safe in a program with threads.
    code = (
        "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15);"
        " os.execvp(sys.argv[1], sys.argv[1:])"
    )
    return [sys.executable, "-S", "-E", "-c", code, *arguments]


def _end(process: subprocess.Popen[str]) -> None:
    """End the process, and the children that it has started: they may keep its output open."""
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(5)
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)


def remembered_urls(state_dir: Path, port: int) -> Path:
    """The file that lists the present public URL of a receiver, and then the former ones. Several
    receivers may use the same folder, so the file's name contains the port of the receiver."""
    return state_dir / f"receiver-urls-{port}.json"


def remember(url: str, remembered: Path) -> None:
    """Write into the file that `url` is the present URL. The former URLs stay in the file until
    `move_webhooks` has moved the webhooks that post to them, also after a restart."""
    remembered.parent.mkdir(parents=True, exist_ok=True)
    with _writing:
        known = read_json(remembered) or []
        write_by_rename(remembered, json.dumps([url, *(each for each in known if each != url)]))


def move_webhooks(remembered: Path, hubs: Sequence[HubCredentials]) -> bool:
    """Change the webhooks on `hubs` that post to a former URL, so that they post to the present
    URL.

    Returns True if nothing is left to do. Returns False if a hub failed or the file could not be
    used: call this function again later. If a hub refuses the token, another call would not help.
    So this hub counts as done, and the log asks the user to change the webhooks of this hub by
    hand.
    """
    try:
        known = json.loads(remembered.read_text())
        url, *former = known
        are_moved = [_move(hub, former, url) for hub in hubs if former]
        with _writing:
            if all(are_moved) and json.loads(remembered.read_text()) == known:
                write_by_rename(remembered, json.dumps([url]))
    except OSError as error:
        _logger.warning("%s cannot be used (%s)", remembered, error)
        return False
    return all(are_moved)


def _move(hub: HubCredentials, former: Sequence[str], url: str) -> bool:
    try:
        for webhook in list_webhooks(endpoint=hub.endpoint, token=hub.token):
            posts_to = webhook.url or ""
            # One known URL may be a prefix of another known URL, so take the longest URL that
            # matches. If the longest one is the new URL, the webhook already posts to the new URL.
            matching = [each for each in (url, *former) if f"{posts_to}/".startswith(f"{each}/")]
            old = max(matching, key=len, default=url)
            if old != url:
                moved = url + posts_to.removeprefix(old)
                update_webhook(webhook.id, url=moved, endpoint=hub.endpoint, token=hub.token)
                _logger.warning("Webhook %s now posts to %s", webhook.id, moved)
    except ReceiverError as error:
        _logger.warning(
            "Webhooks that post to %s are not updated yet; without the right to update them, change"
            " their URL to %s by hand: %s",
            *(", ".join(former), url, error),
        )
        return isinstance(error, NotAllowed)
    return True
