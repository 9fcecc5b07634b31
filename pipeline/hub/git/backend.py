"""Runs one `git http-backend` process (a CGI program) per request: makes its environment, reads its
answer, and ends it."""

import asyncio
import os
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from starlette.types import Receive, Scope, Send

from pipeline.hub.errors import HubError
from pipeline.hub.git.cleanup import GRACE_SECONDS
from pipeline.hub.git.process import PLACE, PULL_REQUEST_PREFIX, PUSHED_PREFIXES, git_environment

_CHUNK_BYTES = 64 * 1024

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
    route: str, folder: Path, scope: Scope, num_bytes: int, open_refs: Iterable[str]
) -> dict[str, str]:
    """The environment for `git http-backend` in the repository `folder`. `num_bytes` is the size of
    the request's body. `open_refs` are the refs of open pull requests, to which a client may
    push."""
    cgi = {
        PLACE: str(folder),
        "PATH_INFO": f"/{route}",
        "GIT_HTTP_EXPORT_ALL": "1",
        "REQUEST_METHOD": scope["method"],
        "QUERY_STRING": scope["query_string"].decode("latin-1"),
        "REMOTE_USER": "hub",
        "REMOTE_ADDR": scope["client"][0] if scope.get("client") else "",
        "CONTENT_LENGTH": str(num_bytes),
        "CONTENT_TYPE": header(scope, b"content-type").decode("latin-1"),
    }
    if encoding := header(scope, b"content-encoding"):
        cgi["HTTP_CONTENT_ENCODING"] = encoding.decode("latin-1")
    if protocol := header(scope, b"git-protocol"):
        cgi["GIT_PROTOCOL"] = protocol.decode("latin-1")
    return git_environment(
        cgi, [*_SETTINGS, *(("receive.hideRefs", f"!{ref}") for ref in open_refs)]
    )


def header(scope: Scope, name: bytes) -> bytes:
    headers: Iterable[tuple[bytes, bytes]] = scope["headers"]
    return next((value for key, value in headers if key == name), b"")


async def serve(environment: dict[str, str], body: IO[bytes], receive: Receive, send: Send) -> None:
    """Sends git's answer while git writes it. Ends git if the client disconnects."""
    process = await _start(environment, body, stderr=asyncio.subprocess.DEVNULL)
    # The hub has the complete body, so the next message can only be that the client disconnects.
    gone = asyncio.create_task(_kill_on_disconnect(process, receive))
    try:
        assert process.stdout is not None
        try:
            head = await process.stdout.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            if gone.done():
                return
            raise HubError("git http-backend ended without an answer to a clone.") from None
        await send_start(send, *parse_head(head))
        while chunk := await process.stdout.read(_CHUNK_BYTES):
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await process.wait()
        await send_end(send, b"")
    finally:
        gone.cancel()
        await _end(process)


async def _kill_on_disconnect(process: asyncio.subprocess.Process, receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    _signal(process, signal.SIGTERM)


@dataclass(frozen=True, kw_only=True)
class Answer:
    output: bytes
    complaints: bytes
    is_whole: bool
    """Whether git exited with 0. If not, it may have left locks in the repository."""


async def run(environment: dict[str, str], body: IO[bytes]) -> Answer:
    """Runs git to its end. Kills git only if this task is cancelled. After a cancellation or a
    failure of git, no process that git started is left."""
    process = await _start(environment, body, stderr=asyncio.subprocess.PIPE)
    try:
        output, complaints = await process.communicate()
    finally:
        await _end(process)
    return Answer(output=output, complaints=complaints, is_whole=process.returncode == 0)


async def _start(
    environment: dict[str, str], body: IO[bytes], *, stderr: int
) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        "git",
        "http-backend",
        stdin=body.fileno(),
        stdout=asyncio.subprocess.PIPE,
        stderr=stderr,
        env=environment,
        start_new_session=True,
    )


async def _end(process: asyncio.subprocess.Process) -> None:
    """Ends git and the processes that it started, if git has not exited with 0. They get SIGTERM
    first, so that they can remove their locks, and after a few seconds SIGKILL."""
    if process.returncode == 0:
        return
    try:
        async with asyncio.timeout(GRACE_SECONDS):
            while _signal(process, signal.SIGTERM):
                await asyncio.sleep(0.01)
    except TimeoutError:
        pass
    finally:
        _signal(process, signal.SIGKILL)
    # Read the pipes to their end, because asyncio's `wait` also waits until they are closed.
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


def parse_answer(told: Answer) -> tuple[int, Headers, bytes]:
    """The status, headers and body of the answer. Raises HubError with git's own error text if git
    printed no complete head."""
    head, separator, body = told.output.partition(b"\r\n\r\n")
    if not separator:
        reason = told.complaints.decode(errors="replace").strip()
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


async def send_start(send: Send, status: int, headers: Headers) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def send_end(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body})
