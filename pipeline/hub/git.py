"""Runs git in an environment that has only what is set here, so that git ignores the settings of
the user who started the hub: one command at a time (`git`), or `git http-backend`, a CGI program,
once per request of a git client (`stream` and `run`).

Also ends git processes that outlived their hub, and removes what killed ones left in a repository:
locks, half-written objects, and refs of commits that were never finished. It never removes a
complete object, or a ref to a commit that a client was told of.
"""

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncGenerator, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from anyio import CancelScope
from starlette.requests import Request

from pipeline.hub.errors import BadRequest, DiskFull, HubError

logger = logging.getLogger(__name__)

PLACE = "GIT_PROJECT_ROOT"
"""The environment variable that tells a git process its repository. By this variable, the git
processes of a killed hub are found."""
KEEP_PREFIX = "refs/keep/"
"""Refs that keep commits during a garbage collection (`garbage.py`)."""
INCOMING_PREFIX = "refs/incoming/"
"""Refs to commits that the API is making (`commits.py`). If a killed hub left some, the next hub
removes them when it starts."""
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

_ALWAYS = (
    # Git collects no garbage by itself. Commits that no ref leads to are removed only by
    # `garbage.py`.
    ("gc.auto", "0"),
    ("receive.autogc", "false"),
    # A push that the hub has confirmed survives a power cut.
    ("core.fsync", "all"),
    ("core.fsyncMethod", "batch"),
    # Git refuses a push of a tree with '..' or '.git' in it, so nobody can clone the tree.
    ("transfer.fsckObjects", "true"),
    ("http.receivepack", "true"),
    # A client can fetch any commit by its sha: a job may need one that a force-push removed from
    # its branch.
    ("uploadpack.allowAnySHA1InWant", "true"),
    ("uploadpack.allowFilter", "true"),
)

# The words by which git's error text says that the disk is full. The first two come from the system
# (in English, because LC_ALL is C), the others from git itself.
_DISK_FULL = ("No space left", "Disk quota", "write error", "couldn't write")

_BROKEN_REF = b"ignoring broken ref"
"""Git writes this in a warning, and ends with 0."""


def git_environment(
    extra: Mapping[str, str] | None = None, settings: Iterable[tuple[str, str]] = ()
) -> dict[str, str]:
    """The environment of one git process: `extra` are further variables, and `settings` are keys
    and values of git's configuration for this process only."""
    configured = [*_MEMORY, *_ALWAYS, *settings]
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


@dataclass(frozen=True, kw_only=True)
class Signature:
    """The author and the committer of a commit."""

    name: str
    email: str

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables from which git takes the author, the committer and the
        tagger."""
        return {
            f"GIT_{role}_{fact}": value
            for role in ("AUTHOR", "COMMITTER")
            for fact, value in (("NAME", self.name), ("EMAIL", self.email))
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
    into: IO[bytes] | None = None,
) -> bytes:
    """Runs `git` in the bare repository `folder` and returns what it printed, or writes it to the
    file `into`. `stdin` may be a file, which git reads from its position.

    Raises HubError with git's own error text if the exit code is neither 0 nor in `may_exit_with`,
    or if git left out a ref that it cannot read. Raises DiskFull if the text says that the disk is
    full. Raises BadRequest, and ends git, if git needs more than `seconds`.
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
        raise BadRequest(
            f"git {arguments[0]} needed more than {seconds:g} s, and was ended: send less at once, "
            "and use fewer `*` in each pattern of .gitattributes and .gitignore."
        ) from None
    except FileNotFoundError:
        raise HubError("The program 'git' is not on PATH; install git and start again.") from None
    if done.returncode not in (0, *may_exit_with) or _BROKEN_REF in done.stderr:
        reason = done.stderr.decode(errors="replace").strip()
        if any(words in reason for words in _DISK_FULL):
            raise DiskFull(
                f"The hub's disk is full (git {arguments[0]}): make room, and try again."
            )
        raise HubError(f"git {arguments[0]} failed in {folder}: {reason}")
    return done.stdout or b""


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
    deadline = time.monotonic() + 5
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


_CHUNK_BYTES = 64 * 1024
_END_OF_HEAD = b"\r\n\r\n"

_OVER_HTTP = (
    # `git push origin :main` may delete the default branch. By default, git refuses this and names
    # a setting of the server, which the user cannot change.
    ("receive.denyDeleteCurrent", "ignore"),
    # No client sees or moves a hidden ref. `!` means "not hidden". The last setting that matches a
    # ref decides.
    ("transfer.hideRefs", "refs"),
    *(("transfer.hideRefs", f"!{prefix.rstrip('/')}") for prefix in PUSHED_PREFIXES),
    ("uploadpack.hideRefs", f"!{PULL_REQUEST_PREFIX.rstrip('/')}"),
)
_HIDDEN = b"deny updating a hidden ref"
_REASON = (
    f"This hub only takes pushes to {' and '.join(PUSHED_PREFIXES)}, and to {PULL_REQUEST_PREFIX} "
    "of an open pull request: push to a branch or a tag."
)
_MAX_REMARK_BYTES = 900

Headers = list[tuple[bytes, bytes]]


def cgi_environment(
    request: Request, folder: Path, body: IO[bytes], open_refs: Iterable[str]
) -> dict[str, str]:
    """The environment for `git http-backend` in the repository `folder`. `body` is the request's
    body. `open_refs` are the refs of open pull requests, to which a client may push."""
    service = request.url.path.rpartition("/")[2]
    cgi = {
        PLACE: str(folder),
        "PATH_INFO": "/info/refs" if request.method == "GET" else f"/{service}",
        "GIT_HTTP_EXPORT_ALL": "1",
        "REQUEST_METHOD": request.method,
        "QUERY_STRING": request.url.query,
        "REMOTE_USER": "hub",
        "CONTENT_LENGTH": str(os.fstat(body.fileno()).st_size),
        "CONTENT_TYPE": request.headers.get("content-type", ""),
        "HTTP_CONTENT_ENCODING": request.headers.get("content-encoding", ""),
        "GIT_PROTOCOL": request.headers.get("git-protocol", ""),
    }
    return git_environment(
        cgi, [*_OVER_HTTP, *(("receive.hideRefs", f"!{ref}") for ref in open_refs)]
    )


async def stream(environment: dict[str, str], body: IO[bytes]) -> AsyncGenerator[bytes, None]:
    """Gives the head of git's answer, and then its body in pieces, while git writes it. Ends git if
    the client goes away. Raises HubError if git answers nothing."""
    process = await asyncio.create_subprocess_exec(
        *("git", "http-backend"),
        stdin=body.fileno(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        try:
            yield await process.stdout.readuntil(_END_OF_HEAD)
        except asyncio.IncompleteReadError:
            raise HubError("git http-backend ended without an answer to a clone.") from None
        while piece := await process.stdout.read(_CHUNK_BYTES):
            yield piece
        await process.wait()
    finally:
        # Shielded, because the request of a client that goes away is cancelled.
        with CancelScope(shield=True):
            # Kill git and the processes that it started. macOS raises PermissionError if the group
            # has no process left.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if process.returncode != 0:
                    os.killpg(process.pid, signal.SIGKILL)
            # A client that went away has left something in the pipe, and asyncio's `wait` also
            # waits until it is closed.
            while await process.stdout.read(_CHUNK_BYTES):
                pass
            await process.wait()


def run(environment: dict[str, str], body: IO[bytes]) -> subprocess.CompletedProcess[bytes]:
    """Runs git to its end, also if the client goes away."""
    return subprocess.run(
        ["git", "http-backend"],
        stdin=body,
        capture_output=True,
        env=environment,
        start_new_session=True,
    )


def parse_head(head: bytes) -> tuple[int, Headers]:
    """The status and the ASGI headers that the head of a CGI answer gives (RFC 3875, 6.3)."""
    status, headers = 200, []
    for line in head.strip().split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"status":
            status = int(value.split()[0])
        else:
            headers.append((name.lower(), value.strip()))
    return status, headers


def parse_answer(done: subprocess.CompletedProcess[bytes]) -> tuple[int, Headers, bytes]:
    """The status, headers and body of the answer. Raises HubError with git's own error text if git
    printed no complete head."""
    head, separator, body = done.stdout.partition(_END_OF_HEAD)
    if not separator:
        reason = done.stderr.decode(errors="replace").strip()
        raise HubError(f"git http-backend ended without an answer: {reason}")
    return *parse_head(head), body


def with_remarks(answer: bytes, remarks: Sequence[str]) -> bytes:
    """The answer to a push, with `remarks` before it, for the person who pushed. If git refused to
    move a hidden ref, one more line says why.

    The pusher's git prints each line as "remote: …":
    https://git-scm.com/docs/gitprotocol-pack#_report_status
    """
    lines = [*remarks, *([_REASON] if _HIDDEN in answer else [])]
    # Remarks can be sent only in side bands, which are channels in git's protocol. If the client
    # reads side bands, git's answer begins with a packet of side band 1 or 2.
    if answer[4:5] not in (b"\x01", b"\x02"):
        return answer
    packets = []
    for line in lines:
        plain = "".join(letter if letter.isprintable() else "?" for letter in line)
        text = b"\x02" + plain.encode()[:_MAX_REMARK_BYTES] + b"\n"
        packets.append(b"%04x%s" % (len(text) + 4, text))
    return b"".join(packets) + answer
