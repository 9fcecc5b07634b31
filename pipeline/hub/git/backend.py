"""Runs one `git http-backend` process (a CGI program) per request: makes its environment, reads its
answer, and ends it."""

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncGenerator, Iterable, Sequence
from pathlib import Path
from typing import IO

from anyio import CancelScope
from starlette.requests import Request

from pipeline.hub.errors import HubError
from pipeline.hub.git.process import (
    GRACE_SECONDS,
    PLACE,
    PULL_REQUEST_PREFIX,
    PUSHED_PREFIXES,
    git_environment,
)

_CHUNK_BYTES = 64 * 1024
_END_OF_HEAD = b"\r\n\r\n"

_SETTINGS = (
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
        cgi, [*_SETTINGS, *(("receive.hideRefs", f"!{ref}") for ref in open_refs)]
    )


async def stream(environment: dict[str, str], body: IO[bytes]) -> AsyncGenerator[bytes, None]:
    """Gives the head of git's answer, and then its body in pieces, while git writes it. Ends git if
    the client goes away. Raises HubError if git answers nothing."""
    process = await _start(environment, body, stderr=subprocess.DEVNULL)
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
            await _end(process)


async def run(environment: dict[str, str], body: IO[bytes]) -> subprocess.CompletedProcess[bytes]:
    """Runs git to its end. Kills git only if this task is cancelled. After a cancellation or a
    failure of git, no process that git started is left."""
    process = await _start(environment, body, stderr=subprocess.PIPE)
    try:
        output, complaints = await process.communicate()
    finally:
        await _end(process)
    assert process.returncode is not None
    return subprocess.CompletedProcess("git", process.returncode, output, complaints)


async def _start(
    environment: dict[str, str], body: IO[bytes], *, stderr: int
) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        "git",
        "http-backend",
        stdin=body.fileno(),
        stdout=subprocess.PIPE,
        stderr=stderr,
        env=environment,
        start_new_session=True,
    )


async def _end(process: asyncio.subprocess.Process) -> None:
    """Ends git and the processes that it started, if git has not exited with 0. They get SIGTERM
    first, so that they can remove their locks, and after a few seconds SIGKILL."""
    if process.returncode != 0:
        try:
            async with asyncio.timeout(GRACE_SECONDS):
                while _signal(process, signal.SIGTERM):
                    await asyncio.sleep(0.01)
        except TimeoutError:
            pass
        finally:
            _signal(process, signal.SIGKILL)
    # Read the pipes to their end: a client that went away has left something in them, and asyncio's
    # `wait` also waits until they are closed.
    for pipe in (process.stdout, process.stderr):
        while pipe is not None and await pipe.read(_CHUNK_BYTES):
            pass
    await process.wait()


def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> bool:
    """Sends a signal to the process group, which may live longer than its first process. Returns
    False if the group has no process left."""
    try:
        os.killpg(process.pid, number)
    except (ProcessLookupError, PermissionError):
        # If the group has no process left, macOS raises PermissionError.
        return False
    return True


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
