"""Finds the Git LFS server of a git repository from the repository's URL, and the login for it.

git-lfs uses the same rules:
https://github.com/git-lfs/git-lfs/blob/main/docs/api/server-discovery.md
"""

import base64
import json
import os
import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

SECONDS = 60.0
_LOGIN = re.compile(r"://[^/\s]+@")
_SCP_LIKE = re.compile(r"(?P<login>(?:[^@/:]+@)?[^@/:]+):(?P<path>(?!//).+)")


@dataclass(frozen=True, kw_only=True)
class Address:
    url: str
    headers: dict[str, str] = field(default_factory=dict)
    """HTTP headers with the login, if the repository's URL or the server has given one."""


def address_of(url: str) -> Address | Path:
    """The LFS server of the repository at `url`. If the repository is on this machine, its
    folder."""
    parsed = urlsplit(url)
    if parsed.scheme == "file":
        return Path(unquote(parsed.path))
    if parsed.scheme in ("http", "https"):
        host = parsed.netloc.rpartition("@")[2]
        headers = {}
        if parsed.password is not None:
            headers = _basic(unquote(parsed.username or ""), unquote(parsed.password))
        return Address(url=f"{parsed.scheme}://{host}{_lfs_path(parsed.path)}", headers=headers)
    if parsed.scheme == "ssh":
        port = ("-p", str(parsed.port)) if parsed.port else ()
        login = parsed.netloc.rpartition(":")[0] if parsed.port else parsed.netloc
        return _by_ssh(login, parsed.path, *port)
    if parsed.scheme and "://" in url:
        return Address(url=f"https://{parsed.netloc}{_lfs_path(parsed.path)}")
    if found := _SCP_LIKE.fullmatch(url):
        return _by_ssh(found["login"], found["path"])
    return Path(url)


def credentials(url: str) -> dict[str, str]:
    """The login for `url` from git's credential helpers, as HTTP headers. Empty if they have
    none."""
    parsed = urlsplit(url)
    question = f"protocol={parsed.scheme}\nhost={parsed.netloc}\npath={parsed.path[1:]}\n\n"
    answer = _run(["git", "credential", "fill"], question)
    if answer is None:
        return {}
    found = dict(line.split("=", 1) for line in answer.splitlines() if "=" in line)
    if "password" not in found:
        return {}
    return _basic(found.get("username", ""), found["password"])


def without_logins(text: str) -> str:
    """`text` without the logins in its URLs. Error messages go into logs and into the job's
    outcome, which must not contain passwords."""
    return _LOGIN.sub("://", text)


def git_environment() -> dict[str, str]:
    """The environment for git commands. With it, git never asks for a password at a terminal."""
    return {
        **os.environ,
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_ALLOW_PROTOCOL": "file:git:http:https:ssh",
        "LC_ALL": "C",
    }


def _by_ssh(login: str, path: str, *options: str) -> Address:
    """Ask the SSH server for the address of its LFS server. If it gives none, use the same host and
    path over https."""
    command = ["ssh", "-o", "BatchMode=yes", *options, "--", login]
    answer = _run([*command, f"git-lfs-authenticate {_quoted(path.lstrip('/'))} download"])
    if answer is not None:
        try:
            told = json.loads(answer)
            headers = {str(name): str(value) for name, value in (told.get("header") or {}).items()}
            return Address(url=str(told["href"]).rstrip("/"), headers=headers)
        except (ValueError, KeyError, AttributeError):
            pass  # without LFS, an SSH server may answer with any text
    host = login.rpartition("@")[2]
    return Address(url=f"https://{host}{_lfs_path('/' + path.lstrip('/'))}")


def _run(command: list[str], question: str = "") -> str | None:
    """The output of the command. None if the program is missing, fails, or takes too long."""
    try:
        done = subprocess.run(
            command,
            input=question,
            env=git_environment(),
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _lfs_path(path: str) -> str:
    path = path.rstrip("/")
    return f"{path}/info/lfs" if path.endswith(".git") else f"{path}.git/info/lfs"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _basic(user: str, password: str) -> dict[str, str]:
    token = base64.b64encode(f"{user}:{password}".encode()).decode()
    return {"Authorization": f"Basic {token}"}
