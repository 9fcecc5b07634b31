"""Runs git in an environment that has only what is set here, so that git ignores the settings of
the user who started the hub. Ends git processes that outlived their hub, and removes what killed
ones left in a repository: locks, half-written objects, and refs of commits that were never
finished. It never removes a complete object, or a ref to a commit that a client was told of."""

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO

from pipeline.hub.errors import DiskFull, HubError, TooSlow

logger = logging.getLogger(__name__)

GRACE_SECONDS = 5.0
"""How long the hub waits for git processes that it has told to end."""
PLACE = "GIT_PROJECT_ROOT"
"""The environment variable that tells a git process its repository. By this variable, the git
processes of a killed hub are found."""
KEEP_PREFIX = "refs/keep/"
"""Refs that keep commits during a garbage collection (`repositories/garbage.py`)."""
INCOMING_PREFIX = "refs/incoming/"
"""Refs to commits that the API is making (`commits/fast_import.py`). If a killed hub left some, the
next hub removes them when it starts."""
PUSHED_PREFIXES = ("refs/heads/", "refs/tags/")
"""Branches and tags. Clients see and move them. Git refuses a push of other refs, because it might
change what the hub reads. The refs of open pull requests are an exception."""
PULL_REQUEST_PREFIX = "refs/pr/"
"""Refs of pull requests. The hub creates them. Clients see all of them, and move those of open pull
requests."""
NO_REF = "0" * 40
"""Git's word for the sha of a ref that does not exist."""
SEEN_PREFIXES = (*PUSHED_PREFIXES, PULL_REQUEST_PREFIX)

# Limits on the memory of each git process. Git never holds a file above `bigFileThreshold` in
# memory as a whole, and stores such a file complete. A smaller file may be stored as its difference
# from another version, which makes packs smaller.
_MEMORY = (
    ("core.bigFileThreshold", "16m"),
    ("core.packedGitWindowSize", "16m"),
    ("core.packedGitLimit", "64m"),
    ("core.deltaBaseCacheLimit", "32m"),
    ("pack.windowMemory", "64m"),
)

# The words by which git's error text says that the disk is full. The first two come from the system
# (in English, because LC_ALL is C), the others from git itself.
_DISK_FULL = ("No space left", "Disk quota", "write error", "couldn't write")


def git_environment(
    extra: Mapping[str, str] | None = None, settings: Iterable[tuple[str, str]] = ()
) -> dict[str, str]:
    """The environment of one git process: `extra` are further variables, and `settings` are keys
    and values of git's configuration for this process only."""
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
        # Otherwise, a ref named refs/replace/SHA would make git return other bytes for this sha.
        "GIT_NO_REPLACE_OBJECTS": "1",
        **configuration,
        **(extra or {}),
    }


def lines_of(output: bytes) -> list[str]:
    """The lines that git printed. `str.splitlines` would also split at U+2028, which may be in the
    name of a ref or a file. A byte that is not UTF-8 becomes an escape such as `\\xff`, so that two
    different names stay different."""
    return output.decode(errors="backslashreplace").removesuffix("\n").split("\n") if output else []


def git(
    folder: Path,
    *arguments: str,
    stdin: bytes | IO[bytes] = b"",
    extra: Mapping[str, str] | None = None,
    may_exit_with: Collection[int] = (),
    seconds: float | None = None,
    complaints: list[str] | None = None,
    into: IO[bytes] | None = None,
) -> bytes:
    """Runs `git` in the bare repository `folder` and returns what it printed, or writes it to the
    file `into`. `stdin` may be a file, which git reads from its position.

    Raises HubError with git's own error text if the exit code is neither 0 nor in `may_exit_with`,
    or DiskFull if this text says that the disk is full. Raises TooSlow, and ends git, if git needs
    more than `seconds`. The lines that git wrote to standard error are added to `complaints`.
    """
    try:
        done = subprocess.run(
            ["git", f"--git-dir={folder}", *arguments],
            input=stdin if isinstance(stdin, bytes) else None,
            stdin=None if isinstance(stdin, bytes) else stdin,
            stdout=subprocess.PIPE if into is None else into,
            stderr=subprocess.PIPE,
            env=git_environment({PLACE: str(folder), **(extra or {})}),
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        raise TooSlow(f"git {arguments[0]} needed more than {seconds:g} s.") from None
    except FileNotFoundError:
        raise HubError("The program 'git' is not on PATH; install git and start again.") from None
    if done.returncode not in (0, *may_exit_with):
        reason = done.stderr.decode(errors="replace").strip()
        if any(words in reason for words in _DISK_FULL):
            raise DiskFull(
                f"The hub's disk is full (git {arguments[0]}): make room, and try again."
            )
        raise HubError(f"git {arguments[0]} failed in {folder}: {reason}")
    if complaints is not None:
        complaints += lines_of(done.stderr)
    return done.stdout or b""


@contextlib.contextmanager
def output_of(folder: Path, *arguments: str) -> Iterator[IO[bytes]]:
    """What git prints, to be read while git writes it. Git is ended after the block."""
    with subprocess.Popen(
        ["git", f"--git-dir={folder}", *arguments],
        env=git_environment({PLACE: str(folder)}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        assert process.stdout is not None
        try:
            yield process.stdout
        finally:
            process.kill()


_LEFTOVERS = (
    *("*.lock", "refs/**/*.lock", "objects/info/*.lock", "objects/pack/*.lock"),
    # Folders in which git unpacks a push until it has checked the push. Older versions of git use
    # the second name.
    *("objects/tmp_objdir-*", "objects/incoming-*"),
    # Unfinished packs, and marks of a push that was being stored: git never removes a pack that has
    # such a mark.
    *("objects/pack/tmp_*", "objects/pack/*.keep"),
    # Refs of commits over the API, and the crash reports of `git fast-import`.
    *(f"{INCOMING_PREFIX}*", "fast_import_crash_*"),
)


def clear_repository(folder: Path) -> None:
    """Removes what killed git processes left. It is called only while nothing writes to the
    repository: the caller holds the repository's lock, or the hub has not started."""
    for pattern in _LEFTOVERS:
        for path in folder.glob(pattern):
            logger.warning("removing %s: the git process that made it was killed", path)
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def end_processes(root: Path) -> None:
    """Ends the git processes of an earlier hub in `root`, because they may hold locks and move
    refs.

    Only Linux shows the environment of a process, by which they are found. On other systems they
    run to their end.
    """
    deadline = time.monotonic() + GRACE_SECONDS
    while (pids := list(_processes(root))) and time.monotonic() < deadline:
        for pid in pids:
            logger.warning("ending process %d, a git process of an earlier hub", pid)
            # At once: `clear_repository` removes the locks.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _processes(root: Path) -> Iterator[int]:
    """The ids of git processes that work below `root`. They are found by the variable `PLACE` in
    their environment, which git passes on to the processes that it starts."""
    place = os.fsencode(f"{PLACE}={root}/")
    for environment in Path("/proc").glob("[0-9]*/environ"):
        # The processes of other users cannot be read, and a process may end while it is read.
        with contextlib.suppress(OSError):
            if any(each.startswith(place) for each in environment.read_bytes().split(b"\0")):
                yield int(environment.parent.name)
