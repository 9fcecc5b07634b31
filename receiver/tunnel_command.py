"""What to start for a public URL, and how its output tells that URL. Starts nothing itself."""

import re
import shlex
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

from receiver.errors import TunnelFailed


@dataclass(frozen=True, kw_only=True)
class TunnelCommand:
    arguments: tuple[str, ...]
    url_in: Callable[[str], str | None]
    """The public URL, if this line of the output tells it."""
    is_worth_reading: Callable[[str], bool] = lambda line: bool(line)
    """Whether a person should see the line when the command fails."""


def tunnel_command(
    tunnel: str, address: str, *, url_pattern: str, former_url: str | None = None
) -> TunnelCommand:
    """The command that makes `address` (`host:port`) public.

    Args:
        tunnel: `ssh://user@host[:port]`, or a command, in which `{address}` and `{port}` stand for
            where the receiver listens.
        url_pattern: A regular expression: its first match in the command's output is the URL.
        former_url: A URL to ask for again, where the other side lets us ask.

    Raises:
        TunnelFailed: `tunnel` is neither, or its program is not installed.
    """
    if tunnel.startswith("ssh://"):
        command = _ssh(tunnel, address, former_url)
    else:
        command = _any(tunnel, address, url_pattern)
    program = command.arguments[0]
    if shutil.which(program) is None:
        raise TunnelFailed(
            f"The tunnel's program {program!r} is not on PATH: install it, or take another tunnel."
        )
    return command


def _ssh(tunnel: str, address: str, former_url: str | None) -> TunnelCommand:
    try:
        parts = urlsplit(tunnel)
        host, ssh_port = parts.hostname, parts.port
    except ValueError as error:
        raise TunnelFailed(f"The tunnel {tunnel!r} is no address: {error}.") from error
    if not host or parts.password or parts.path.strip("/") or parts.query:
        raise TunnelFailed(
            f"The tunnel {tunnel!r} is not of the form ssh://user@host[:port]; keys and other"
            " options belong into ~/.ssh/config."
        )
    # Port 0: the server chooses, and says which.
    port = urlsplit(former_url).port if former_url is not None else 0
    options = {
        "BatchMode": "yes",
        "ControlPath": "none",
        "ConnectTimeout": "10",
        "ExitOnForwardFailure": "yes",
        "ServerAliveInterval": "5",
        "ServerAliveCountMax": "3",
    }
    arguments = ["ssh", "-v", "-N", "-T"]
    for name, value in options.items():
        arguments += ["-o", f"{name}={value}"]
    if ssh_port is not None:
        arguments += ["-p", str(ssh_port)]
    arguments += ["-R", f"*:{port}:{address}", "--"]
    arguments.append(host if parts.username is None else f"{parts.username}@{host}")

    def url_in(line: str) -> str | None:
        if chosen := re.search(r"Allocated port (\d+) for remote forward", line):
            shown = f"[{host}]" if ":" in host else host
            return f"http://{shown}:{chosen[1]}"
        return former_url if port and "remote forward success for" in line else None

    return TunnelCommand(
        arguments=tuple(arguments),
        url_in=url_in,
        is_worth_reading=lambda line: bool(line) and not line.startswith(("debug", "OpenSSH")),
    )


def _any(tunnel: str, address: str, url_pattern: str) -> TunnelCommand:
    filled = tunnel.replace("{address}", address).replace("{port}", address.rpartition(":")[2])
    try:
        arguments = tuple(shlex.split(filled))
    except ValueError as error:
        raise TunnelFailed(f"The tunnel {tunnel!r} is no command: {error}.") from error
    if not arguments:
        raise TunnelFailed("The tunnel is empty: give ssh://user@host[:port], or a command.")
    pattern = re.compile(url_pattern)

    def url_in(line: str) -> str | None:
        found = pattern.search(line)
        return found[0].rstrip("/") if found else None

    return TunnelCommand(arguments=arguments, url_in=url_in)


def ending_with_this_process(arguments: tuple[str, ...]) -> list[str]:
    """The same command, which on Linux ends when the thread that started it does, however."""
    if sys.platform != "linux":
        return list(arguments)
    # prctl(PR_SET_PDEATHSIG, SIGTERM), in a process of its own: between fork and exec of a program
    # with threads no Python code may run.
    code = (
        "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15);"
        " os.execvp(sys.argv[1], sys.argv[1:])"
    )
    return [sys.executable, "-S", "-E", "-c", code, *arguments]
