"""Keeps a receiver reachable at a public URL, and the webhooks on hubs up to date with this URL.

A tunnel is a command, such as `ssh -R`, that makes the receiver reachable from elsewhere and prints
the URL. From `PublicUrl.open` to `PublicUrl.close`, everyone can reach the receiver. The caller
must check that this is allowed.
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
from urllib.parse import urlsplit

from jobs.folder import write_atomically
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
RENEWED_EARLY = 1 / 24
"""The share of a tunnel's lifetime that is left when the command is started again."""

UrlIn = Callable[[str], str | None]
"""A function that gets a line of a command's output. Returns the public URL if the line has it."""


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
        settings: `tunnel_url_pattern` and `tunnel_lifetime_seconds` describe the tunnel. Without a
            tunnel, `public_url` must already lead to the receiver.
        remembered: The file that lists the former public URLs.
        hubs: The hubs whose webhooks are updated when the URL changes.
        tunnel: An `ssh://` address, or a command. None to use `public_url` of the settings.
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
        self.ends_at: float | None = None
        """When the URL expires, in seconds since the epoch; None if it does not. The tunnel is
        opened again before this time."""
        self._settings = settings
        self._remembered = remembered
        self._hubs = hubs
        self._tunnel = tunnel
        self._address = address
        self._error: Exception | None = None
        self._has_begun = threading.Event()
        self._is_closing = threading.Event()
        self._process: subprocess.Popen[str] | None = None
        self._threads: list[threading.Thread] = []

    def open(self) -> None:
        """Return when there is a URL. Raises `TunnelFailed` if the configuration is wrong, or if
        the command prints no URL at its first start."""
        if self._tunnel is None:
            assert self._settings.public_url is not None
            self.url = self._settings.public_url.rstrip("/")
            self._start_thread(self._move_webhooks, "moved-webhooks", self.url, 0.0)
            return
        self._command(None)
        self._start_thread(self._keep_open, "tunnel")
        try:
            self._has_begun.wait()
        except BaseException:
            # In a notebook, the process lives on after Ctrl-C, and so would the tunnel.
            self.close()
            raise
        if self.url is None:
            raise TunnelFailed(f"The tunnel cannot be opened. {self._error}") from self._error

    def close(self) -> None:
        """End the tunnel. May be called more than once."""
        self._is_closing.set()
        if (process := self._process) is not None:
            _end(process)
        for thread in self._threads:
            thread.join()

    def _start_thread(self, target: Callable[..., None], name: str, *args: object) -> None:
        thread = threading.Thread(target=target, name=name, args=args, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _keep_open(self) -> None:
        pause = 1.0
        former: str | None = None
        try:
            while not self._is_closing.is_set():
                began = time.monotonic()
                try:
                    self._run_command(former)
                    # The command has ended: ask for the same URL again.
                    former = self.url
                except (OSError, RuntimeError, TunnelFailed) as error:
                    if self.url is None:
                        self._error = error
                        return
                    # Perhaps the provider still reserves the former URL.
                    former = None
                    if not self._is_closing.is_set():
                        _logger.warning(
                            "The tunnel cannot be opened; next try in %.0f s. %s", *(pause, error)
                        )
                if time.monotonic() - began > LONGEST_PAUSE_SECONDS:
                    pause = 1.0
                self._is_closing.wait(pause)
                pause = min(pause * 2, LONGEST_PAUSE_SECONDS)
        finally:
            self._has_begun.set()

    def _run_command(self, former: str | None) -> None:
        """Run the command until it ends, until its lifetime is nearly over, or until `close` is
        called. Raises `TunnelFailed` if it prints no URL."""
        arguments, url_in = self._command(former)
        lines: deque[str] = deque(maxlen=5)
        url = None
        with subprocess.Popen(
            _ending_with_this_process(arguments),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            # Give the process its own session. Otherwise Ctrl-C would end the tunnel at once, while
            # the receiver still answers its last requests.
            start_new_session=True,
        ) as process:
            self._process, timer = process, None
            try:
                if self._is_closing.is_set():  # `close` may not have seen the process
                    _end(process)
                timer = _ending_after(START_SECONDS, process)
                assert process.stdout is not None
                for line in map(str.strip, process.stdout):
                    if line and not line.startswith(("debug", "OpenSSH")):
                        lines.append(line[:300])
                    if url is None and (url := url_in(line)) is not None:
                        timer.cancel()
                        lifetime = self._settings.tunnel_lifetime_seconds
                        timer = _ending_after(lifetime * (1 - RENEWED_EARLY), process)
                        self._use(url, ends_at=time.time() + lifetime)
            finally:
                if timer is not None:
                    timer.cancel()
                self._process = None
                _end(process)
        last_output = " | ".join(lines) or "the process printed nothing"
        if url is None:
            raise TunnelFailed(
                f"The command of the tunnel printed no public URL. Its last output: {last_output}"
            )
        if not self._is_closing.is_set():
            _logger.warning("The tunnel is opened again. Its last output: %s", last_output)

    def _command(self, former: str | None) -> tuple[list[str], UrlIn]:
        assert self._tunnel is not None
        return tunnel_command(
            self._tunnel,
            self._address,
            url_pattern=self._settings.tunnel_url_pattern,
            former_url=former,
        )

    def _use(self, url: str, *, ends_at: float) -> None:
        if self._has_begun.is_set():
            _logger.warning("The public URL is %s", url)
        self.url, self.ends_at = url, ends_at
        # First write the URL into the file: `pipeline up` reads it there as soon as the receiver
        # answers.
        is_done = move_webhooks(url, self._remembered, self._hubs)
        self._has_begun.set()
        if not is_done:
            self._start_thread(self._move_webhooks, "moved-webhooks", url, 1.0)

    def _move_webhooks(self, url: str, pause: float) -> None:
        while not self._is_closing.wait(pause) and self.url == url:
            if move_webhooks(url, self._remembered, self._hubs):
                return
            pause = min(max(pause * 2, 1.0), LONGEST_PAUSE_SECONDS)


def tunnel_of(share: bool | str, settings: ReceiverSettings) -> str | None:
    """The tunnel to open; None if none is needed. `share` is the argument of
    `WebhooksServer.launch`. Raises `TunnelFailed` if `share` is True, but neither `tunnel` nor
    `public_url` is set."""
    if isinstance(share, str):
        return share
    if share and settings.tunnel is None and settings.public_url is None:
        raise TunnelFailed(
            "share=True needs a tunnel: pass share='ssh://user@host[:port]' or a command that"
            " prints a public URL (share='cloudflared tunnel --url http://{address}'), or set"
            " `tunnel` in the receiver's settings (`pipeline receiver --tunnel`). If senders can"
            " already reach this server without a tunnel, set `public_url` in the receiver's"
            " settings instead (`pipeline receiver --public-url`)."
        )
    return settings.tunnel if share else None


def remembered_urls(state_dir: Path, port: int) -> Path:
    """The file that lists the present and the former public URLs of a receiver. Several receivers
    may use the same folder, so the file's name contains the port of the receiver."""
    return state_dir / f"receiver-urls-{port}.json"


def tunnel_command(
    tunnel: str, address: str, *, url_pattern: str, former_url: str | None = None
) -> tuple[list[str], UrlIn]:
    """The command that makes `address` (`host:port`) public, and how to find the URL in its output.

    Args:
        tunnel: `ssh://user@host[:port]`, or a command. In a command, `{address}` is replaced by
            `address`, and `{port}` by the port of `address`.
        url_pattern: A regular expression. If `tunnel` is a command, the first match of the
            expression in the command's output is the URL.
        former_url: The URL that the tunnel should get again; None for any URL. Only ssh can ask for
            a URL: it asks its server for the port.

    Raises:
        TunnelFailed: `tunnel` is neither an ssh address nor a command, or its program is not
            installed.
    """
    if tunnel.startswith("ssh://"):
        arguments, url_in = _ssh_command(tunnel, address, former_url)
    else:
        filled = tunnel.replace("{address}", address).replace("{port}", address.rpartition(":")[2])
        try:
            arguments = shlex.split(filled)
        except ValueError as error:
            raise TunnelFailed(f"The tunnel {tunnel!r} is not a command: {error}.") from error
        if not arguments:
            raise TunnelFailed("The tunnel is empty: set ssh://user@host[:port] or a command.")

        def url_in(line: str) -> str | None:
            found = re.search(url_pattern, line)
            return found[0].rstrip("/") if found else None

    if shutil.which(arguments[0]) is None:
        raise TunnelFailed(
            f"The tunnel's program {arguments[0]!r} is not on PATH: install it, or use another"
            " tunnel."
        )
    return arguments, url_in


def _ssh_command(tunnel: str, address: str, former_url: str | None) -> tuple[list[str], UrlIn]:
    try:
        parts = urlsplit(tunnel)
        host, ssh_port = parts.hostname, parts.port
    except ValueError as error:
        raise TunnelFailed(f"The tunnel {tunnel!r} is not an address: {error}.") from error
    if not host or parts.password or parts.path.strip("/") or parts.query:
        raise TunnelFailed(
            f"The tunnel {tunnel!r} is not of the form ssh://user@host[:port]. Put keys and other"
            " options into ~/.ssh/config."
        )
    # With port 0, the ssh server chooses the public port, and ssh prints this port.
    port = urlsplit(former_url).port if former_url is not None else 0
    options = ["BatchMode=yes", "ControlPath=none", "ConnectTimeout=10"]
    options += ["ExitOnForwardFailure=yes", "ServerAliveInterval=5", "ServerAliveCountMax=3"]
    arguments = ["ssh", "-v", "-N", "-T"]
    for option in options:
        arguments += ["-o", option]
    if ssh_port is not None:
        arguments += ["-p", str(ssh_port)]
    arguments += ["-R", f"*:{port}:{address}", "--"]
    arguments.append(host if parts.username is None else f"{parts.username}@{host}")

    def url_in(line: str) -> str | None:
        if chosen := re.search(r"Allocated port (\d+) for remote forward", line):
            shown = f"[{host}]" if ":" in host else host
            return f"http://{shown}:{chosen[1]}"
        return former_url if port and "remote forward success for" in line else None

    return arguments, url_in


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


def _ending_after(seconds: float, process: subprocess.Popen[str]) -> threading.Timer:
    timer = threading.Timer(seconds, _end, [process])
    timer.daemon = True
    timer.start()
    return timer


def _end(process: subprocess.Popen[str]) -> None:
    """End the process, and the children that it has started: they may keep its output open."""
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(5)
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)


def move_webhooks(url: str, remembered: Path, hubs: Sequence[HubCredentials]) -> bool:
    """Change the webhooks on `hubs` that post to a former URL, so that they post to `url`. The file
    `remembered` lists the former URLs, so that they are found after a restart too.

    Returns True if nothing is left to do. Returns False if a hub failed or the file could not be
    used. The caller must then call this function again later. If a hub refuses the token, another
    call would not help. So this hub counts as done, and the log asks the user to change the
    webhooks of this hub by hand.
    """
    try:
        former = [known for known in _read(remembered) if known != url]
        remembered.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(remembered, json.dumps([url, *former]))
        are_moved = [_move(hub, former, url) for hub in hubs if former]
        if not all(are_moved):
            return False
        write_atomically(remembered, json.dumps([url]))
    except OSError as error:
        _logger.warning(
            "%s cannot be used (%s): webhooks that post to a former URL are not updated yet.",
            *(remembered, error),
        )
        return False
    return True


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


def _read(remembered: Path) -> list[str]:
    try:
        known = json.loads(remembered.read_text())
    except FileNotFoundError:
        return []
    except ValueError:
        known = None
    if not isinstance(known, list):
        _logger.warning(
            "%s is not a list of URLs, so the file is overwritten. If the public URL has changed,"
            " change the webhooks that post to a former URL by hand.",
            remembered,
        )
        return []
    return [str(url) for url in known]
