"""Runs git. Its environment is built from nothing, so that no setting of the user's own gets in."""

import os
import subprocess
import threading
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from pipeline.hub.errors import DiskFull, HubError, TooSlow

PLACE = "GIT_PROJECT_ROOT"
"""In the environment of each git process: the repository that it works in."""
KEEP_PREFIX = "refs/keep/"
"""Of the hub's own refs, which clients neither see nor move."""
INCOMING_PREFIX = "refs/incoming/"
"""Of the refs to commits that are being made. What a killed hub left of these is removed at the
start."""
PUSHED_PREFIXES = ("refs/heads/", "refs/tags/")
"""Of the refs that clients see and move. Any other ref might change what the hub reads."""
PULL_REQUEST_PREFIX = "refs/pr/"
"""Of the refs of pull requests, which the hub creates. Clients see them, and move those that are
open."""
SEEN_PREFIXES = (*PUSHED_PREFIXES, PULL_REQUEST_PREFIX)

# Bounds on the memory of each git process. A file above the first one is neither held in memory
# whole nor compared with its other versions; smaller ones are, because that makes packs small.
_MEMORY = (
    ("core.bigFileThreshold", "16m"),
    ("core.packedGitWindowSize", "16m"),
    ("core.packedGitLimit", "64m"),
    ("core.deltaBaseCacheLimit", "32m"),
    ("pack.windowMemory", "64m"),
)

# In the words of the system (LC_ALL is C), of fast-import, and of git's own files of refs.
_DISK_FULL = ("No space left", "Disk quota", "write error", "couldn't write")


def git_environment(
    extra: Mapping[str, str] | None = None, settings: Iterable[tuple[str, str]] = ()
) -> dict[str, str]:
    """settings: of git's configuration, for this process alone."""
    configured = [*_MEMORY, *settings]
    configuration = {"GIT_CONFIG_COUNT": str(len(configured))}
    for number, (key, value) in enumerate(configured):
        configuration |= {f"GIT_CONFIG_KEY_{number}": key, f"GIT_CONFIG_VALUE_{number}": value}
    return {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": os.devnull,
        "LC_ALL": "C",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_OPTIONAL_LOCKS": "0",
        # A ref refs/replace/SHA would have git give other bytes for this sha.
        "GIT_NO_REPLACE_OBJECTS": "1",
        **configuration,
        **(extra or {}),
    }


def lines_of(output: bytes) -> list[str]:
    """What git printed, by line. `str.splitlines` would also split at U+2028, which names of refs
    and files may have. Bytes that are not UTF-8 become `\\xff`: no two of them become the same."""
    return output.decode(errors="backslashreplace").removesuffix("\n").split("\n") if output else []


def is_disk_full(reason: str) -> bool:
    """Whether git failed because nothing more can be written."""
    return any(words in reason for words in _DISK_FULL)


def git_beginning(folder: Path, *arguments: str, max_bytes: int, seconds: float) -> bytes:
    """The first `max_bytes` of what `git` prints; git is ended then. Empty if git fails. What git
    printed until then if it needs more than `seconds`."""
    process = subprocess.Popen(
        ["git", f"--git-dir={folder}", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=git_environment({PLACE: str(folder)}),
    )
    assert process.stdout is not None
    limit = threading.Timer(seconds, process.kill)
    limit.start()
    with process:
        try:
            return process.stdout.read(max_bytes)
        finally:
            limit.cancel()
            process.kill()


def git(
    folder: Path,
    *arguments: str,
    stdin: bytes = b"",
    extra: Mapping[str, str] | None = None,
    may_exit_with: Collection[int] = (),
    seconds: float | None = None,
    complaints: list[str] | None = None,
) -> bytes:
    """What `git` printed in the bare repository `folder`.

    Raises HubError with git's own words if git exits with a code that is neither 0 nor in
    `may_exit_with`. Raises TooSlow if git needs more than `seconds`; git is then ended. What git
    complained of is added to `complaints`.
    """
    try:
        done = subprocess.run(
            ["git", f"--git-dir={folder}", *arguments],
            input=stdin,
            capture_output=True,
            env=git_environment({PLACE: str(folder), **(extra or {})}),
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        raise TooSlow(f"git {arguments[0]} needed more than {seconds:g} s.") from None
    except FileNotFoundError:
        raise HubError("The program 'git' is not on PATH; install git and start again.") from None
    if done.returncode not in (0, *may_exit_with):
        reason = done.stderr.decode(errors="replace").strip()
        if is_disk_full(reason):
            raise DiskFull(
                f"The hub's disk is full (git {arguments[0]}): make room, and try again."
            )
        raise HubError(f"git {arguments[0]} failed in {folder}: {reason}")
    if complaints is not None:
        complaints += lines_of(done.stderr)
    return done.stdout
