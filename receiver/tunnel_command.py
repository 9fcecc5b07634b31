"""Makes the command that opens a tunnel, and finds the public URL in its output."""

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
    """A function that gets a line of the command's output. Returns the public URL if the line
    contains the URL, and None otherwise."""
    is_worth_reading: Callable[[str], bool] = lambda line: bool(line)
    """A function that gets a line of the command's output. Returns whether an error message about
    the tunnel should quote the line."""


def tunnel_command(
    tunnel: str, address: str, *, url_pattern: str, former_url: str | None = None
) -> TunnelCommand:
    """The command that makes `address` (`host:port`) public.

    Args:
        tunnel: `ssh://user@host[:port]`, or a command. In a command, `{address}` is replaced by
            `address`, and `{port}` by the port of `address`.
        url_pattern: A regular expression. If `tunnel` is a command, the first match of the
            expression in the command's output is the URL. Not used for an `ssh://` address.
        former_url: The URL that the tunnel had before and should get again; None if the tunnel may
            get any URL. If the tunnel is an `ssh://` address, ssh asks its server for the port of
            `former_url`. If the tunnel is a command, `former_url` is ignored.

    Raises:
        TunnelFailed: `tunnel` is neither an ssh address nor a command, or its program (`ssh`, or
            the program of the command) is not installed.
    """
    if tunnel.startswith("ssh://"):
        command = _ssh_command(tunnel, address, former_url)
    else:
        command = _custom_command(tunnel, address, url_pattern)
    program = command.arguments[0]
    if shutil.which(program) is None:
        raise TunnelFailed(
            f"The tunnel's program {program!r} is not on PATH: install it, or use another tunnel."
        )
    return command


def _ssh_command(tunnel: str, address: str, former_url: str | None) -> TunnelCommand:
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


def _custom_command(tunnel: str, address: str, url_pattern: str) -> TunnelCommand:
    filled = tunnel.replace("{address}", address).replace("{port}", address.rpartition(":")[2])
    try:
        arguments = tuple(shlex.split(filled))
    except ValueError as error:
        raise TunnelFailed(f"The tunnel {tunnel!r} is not a command: {error}.") from error
    if not arguments:
        raise TunnelFailed("The tunnel is empty: set ssh://user@host[:port] or a command.")
    pattern = re.compile(url_pattern)

    def url_in(line: str) -> str | None:
        found = pattern.search(line)
        return found[0].rstrip("/") if found else None

    return TunnelCommand(arguments=arguments, url_in=url_in)


def ending_with_this_process(arguments: tuple[str, ...]) -> list[str]:
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
