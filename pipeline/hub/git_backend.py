"""One `git http-backend` process per request: its CGI environment, its answer, its end."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterable
from typing import IO

from starlette.types import Receive, Scope, Send

from pipeline.hub.errors import HubError
from pipeline.hub.git_process import git_environment
from pipeline.hub.repositories import Repository

_CHUNK_BYTES = 64 * 1024

# Whoever pushes `:main` means it, and cannot reach the configuration that git would refer them to.
_CONFIG = {
    "GIT_CONFIG_COUNT": "1",
    "GIT_CONFIG_KEY_0": "receive.denyDeleteCurrent",
    "GIT_CONFIG_VALUE_0": "ignore",
}

Headers = list[tuple[bytes, bytes]]


def cgi_environment(
    route: str, repository: Repository, scope: Scope, num_bytes: int
) -> dict[str, str]:
    cgi = {
        "GIT_PROJECT_ROOT": str(repository.folder),
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
    return git_environment({**cgi, **_CONFIG})


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
        await send_end(send, b"")
    finally:
        gone.cancel()
        _kill(process)
        await process.wait()


async def _kill_on_disconnect(process: asyncio.subprocess.Process, receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    _kill(process)


async def run(environment: dict[str, str], body: IO[bytes]) -> tuple[bytes, bytes]:
    """All that git answered, and what it complained of; ended only where this is cancelled."""
    process = await _start(environment, body, stderr=asyncio.subprocess.PIPE)
    try:
        return await process.communicate()
    finally:
        _kill(process)


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


def _kill(process: asyncio.subprocess.Process) -> None:
    """With the processes that it started, which are in its group."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


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


async def send_start(send: Send, status: int, headers: Headers) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def send_end(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body})
