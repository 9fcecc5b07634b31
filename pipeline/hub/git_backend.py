"""One `git http-backend` process per request: its CGI environment, its answer, its end."""

import asyncio
import os
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import IO

from starlette.types import Receive, Scope, Send

from pipeline.hub.cleanup import GRACE_SECONDS
from pipeline.hub.errors import HubError
from pipeline.hub.git_process import (
    PLACE,
    PULL_REQUEST_PREFIX,
    PUSHED_PREFIXES,
    git_environment,
)
from pipeline.hub.repositories import Repository

_CHUNK_BYTES = 64 * 1024

_SETTINGS = (
    # Whoever pushes `:main` means it, and cannot reach the configuration that git would refer to.
    ("receive.denyDeleteCurrent", "ignore"),
    # The last one that matches a ref decides. No client sees or moves a ref that is hidden.
    ("transfer.hideRefs", "refs"),
    *(("transfer.hideRefs", f"!{prefix.rstrip('/')}") for prefix in PUSHED_PREFIXES),
    ("uploadpack.hideRefs", f"!{PULL_REQUEST_PREFIX.rstrip('/')}"),
)
_HIDDEN = b"deny updating a hidden ref"
_REASON = (
    f"This hub takes {' and '.join(PUSHED_PREFIXES)}, and {PULL_REQUEST_PREFIX} of an open pull "
    "request: push to a branch or a tag."
)
_MAX_REMARK_BYTES = 900

Headers = list[tuple[bytes, bytes]]


def cgi_environment(
    route: str, repository: Repository, scope: Scope, num_bytes: int, open_refs: Iterable[str]
) -> dict[str, str]:
    """`open_refs` are the pull requests to which a client may push."""
    cgi = {
        PLACE: str(repository.folder),
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
    """Streams what git answers; ends git when the client goes away."""
    process = await _start(environment, body, stderr=asyncio.subprocess.DEVNULL)
    # The body was received whole: the next message can only be the disconnect.
    gone = asyncio.create_task(_kill_on_disconnect(process, receive))
    try:
        assert process.stdout is not None
        try:
            head = await process.stdout.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            if gone.done():
                return
            raise HubError("git http-backend ended without an answer.") from None
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
    """Whether git came to its end; else it was killed, and may have left its locks behind."""


async def run(environment: dict[str, str], body: IO[bytes]) -> Answer:
    """Ended only where this is cancelled. When it returns, no process of this git is left."""
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
    """With the processes that it started: asked first, so that they take their locks away."""
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
    # To their end: until then the pipes stay open, and asyncio's `wait` waits for them.
    for pipe in (process.stdout, process.stderr):
        while pipe is not None and await pipe.read(_CHUNK_BYTES):
            pass
    await process.wait()


def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> bool:
    """To the whole group, which may outlive the process that leads it; False when it is gone."""
    try:
        os.killpg(process.pid, number)
    except (ProcessLookupError, PermissionError):  # the latter is macOS' word for it
        return False
    return True


def parse_head(head: bytes) -> tuple[int, Headers]:
    """A CGI head (RFC 3875, 6.3) as status and ASGI headers."""
    status, headers = 200, []
    for line in head.strip().split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"status":
            status = int(value.split()[0])
        else:
            headers.append((name.lower(), value.strip()))
    return status, headers


def parse_answer(told: Answer) -> tuple[int, Headers, bytes]:
    """Status, headers and body. Raises HubError with git's own words if there is no head."""
    head, separator, body = told.output.partition(b"\r\n\r\n")
    if not separator:
        reason = told.complaints.decode(errors="replace").strip()
        raise HubError(f"git http-backend ended without an answer: {reason}")
    return *parse_head(head), body


def with_remarks(answer: bytes, remarks: Sequence[str]) -> bytes:
    """The answer to a push, and before it lines for the person who pushed. Where git refused a
    hidden ref, one of these lines says why.

    Git prints each line as "remote: …": https://git-scm.com/docs/gitprotocol-pack#_report_status
    """
    lines = [*remarks, *([_REASON] if _HIDDEN in answer else [])]
    # Only a client that takes side bands can be told: git's answer then begins with such a packet.
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
