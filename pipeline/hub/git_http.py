"""Git's smart HTTP protocol: `git http-backend` behind a raw ASGI callable.

A request is received whole before git starts: a client that stalls or goes away in the middle of a
push then holds no lock and no process. The answer to a push is held back until the events of the
refs it moved are on disk. https://git-scm.com/docs/http-protocol, https://git-scm.com/docs/git-http-backend
"""

import asyncio
import contextlib
import logging
import os
import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from tempfile import TemporaryFile
from typing import IO, Literal

from starlette.types import Receive, Scope, Send

from pipeline.hub import auth
from pipeline.hub.database import Database
from pipeline.hub.errors import (
    BadRequest,
    HubError,
    RepositoryNotFound,
    RequestError,
    TooLarge,
    Unauthorized,
)
from pipeline.hub.events import EventLog
from pipeline.hub.git_process import git_environment
from pipeline.hub.metrics import HubMetrics
from pipeline.hub.names import RepositoryType, requested_name
from pipeline.hub.reconcile import record_ref_changes
from pipeline.hub.repositories import Repositories, Repository
from pipeline.hub.settings import HubSettings

logger = logging.getLogger(__name__)

_PATH = re.compile(
    r"/(?:(?P<type>dataset|space)s/)?(?P<owner>[^/]+)/(?P<name>[^/]+?)(?:\.git)?"
    r"/(?P<route>info/refs|git-upload-pack|git-receive-pack)"
)
_SERVICES = ("git-upload-pack", "git-receive-pack")
_CHUNK_BYTES = 64 * 1024
_SPOOL_BYTES = 1024 * 1024

Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True, kw_only=True)
class GitRequest:
    type: RepositoryType
    owner: str
    name: str
    route: Literal["info/refs", "git-upload-pack", "git-receive-pack"]


class _Disconnected(Exception):
    """The client went away before its request was whole."""


def match(scope: Scope) -> GitRequest | None:
    """The request if it is git's, whatever it asks for; else None."""
    found = _PATH.fullmatch(scope["path"])
    if found is None:
        return None
    type: RepositoryType = found["type"] or "model"  # type: ignore[assignment]
    return GitRequest(
        type=type,
        owner=found["owner"],
        name=found["name"],
        route=found["route"],  # type: ignore[arg-type]
    )


class GitHttp:
    def __init__(
        self,
        settings: HubSettings,
        token: str,
        repositories: Repositories,
        database: Database,
        log: EventLog,
        metrics: HubMetrics,
    ) -> None:
        self._settings = settings
        self._token = token
        self._repositories = repositories
        self._database = database
        self._log = log
        self._metrics = metrics
        self._slots = asyncio.Semaphore(settings.max_git_processes)

    async def __call__(
        self, request: GitRequest, scope: Scope, receive: Receive, send: Send
    ) -> None:
        try:
            auth.check_token(scope["headers"], self._token)
            _check(request, scope)
            repository = await asyncio.to_thread(self._find, request)
            with TemporaryFile(dir=self._repositories.incoming) as body:
                await self._receive_body(receive, body)
                environment = _cgi_environment(request, repository, scope, body.tell())
                body.seek(0)
                if request.route == "git-receive-pack":
                    await self._push(request, environment, body, send)
                else:
                    async with self._slots:
                        await _serve(environment, body, receive, send)
        except _Disconnected:
            logger.info("a client went away in the middle of %s", scope["path"])
        except RequestError as error:
            await _send_error(send, error)

    def _find(self, request: GitRequest) -> Repository:
        with self._database.read() as connection:
            try:
                name = requested_name(request.type, request.owner, request.name)
                return self._repositories.find(connection, name)
            except RepositoryNotFound:
                # Git users write /owner/name for datasets too.
                if request.type != "model":
                    raise
                name = requested_name("dataset", request.owner, request.name)
                try:
                    return self._repositories.find(connection, name)
                except RepositoryNotFound:
                    raise RepositoryNotFound(
                        f"No model and no dataset {request.owner}/{request.name} here: create it "
                        f"with `hf repos create {request.owner}/{request.name} --type dataset`."
                    ) from None

    async def _receive_body(self, receive: Receive, body: IO[bytes]) -> None:
        size, waiting = 0, bytearray()
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _Disconnected
            waiting += message.get("body", b"")
            size += len(message.get("body", b""))
            more = message.get("more_body", False)
            if size > self._settings.max_push_bytes:
                raise TooLarge(
                    f"A push may send {self._settings.max_push_bytes} bytes at most: "
                    "push in several parts, or raise [hub] max_push_bytes."
                )
            if waiting and (not more or len(waiting) >= _SPOOL_BYTES):
                try:
                    await asyncio.to_thread(body.write, bytes(waiting))
                except OSError as error:
                    raise HubFull(f"The push could not be stored: {error.strerror}.") from error
                waiting.clear()
        await asyncio.to_thread(body.flush)

    async def _push(
        self, request: GitRequest, environment: dict[str, str], body: IO[bytes], send: Send
    ) -> None:
        repository = await asyncio.to_thread(self._find, request)
        async with self._repositories.lock(repository):
            # Removed or moved while the body came in, or while others held the lock.
            repository = await asyncio.to_thread(self._find, request)
            environment["GIT_PROJECT_ROOT"] = str(repository.folder)
            # Goes on to its end whether or not the client still listens: refs may move any time.
            status, headers, answer = await self._receive_pack(repository, environment, body)
        self._metrics.pushes.labels(result="ok" if status == 200 else "error").inc()
        await _send_start(send, status, headers)
        await _send_end(send, answer)

    async def _receive_pack(
        self, repository: Repository, environment: dict[str, str], body: IO[bytes]
    ) -> tuple[int, Headers, bytes]:
        process = await _start(environment, body, stderr=asyncio.subprocess.PIPE)
        try:
            output, complaints = await process.communicate()
        finally:
            _kill(process)
        head, separator, answer = output.partition(b"\r\n\r\n")
        if not separator:
            reason = complaints.decode(errors="replace").strip()
            raise HubError(f"git http-backend said nothing in {repository.folder}: {reason}")
        # Not before this returns may git's "ok" reach the client.
        await asyncio.to_thread(record_ref_changes, repository, self._log)
        return *_parse_head(head), answer


class HubFull(RequestError):
    status = 507


def _check(request: GitRequest, scope: Scope) -> None:
    service = scope["query_string"].decode("latin-1").removeprefix("service=")
    if request.route == "info/refs":
        if scope["method"] != "GET" or service not in _SERVICES:
            raise BadRequest(
                "This hub speaks git's smart HTTP protocol only; use git 1.6.6 or newer."
            )
    elif scope["method"] != "POST" or _header(scope, b"content-type") != (
        f"application/x-{request.route}-request".encode()
    ):
        raise BadRequest(f"{request.route} takes a POST from git, nothing else.")


def _cgi_environment(
    request: GitRequest, repository: Repository, scope: Scope, num_bytes: int
) -> dict[str, str]:
    cgi = {
        "GIT_PROJECT_ROOT": str(repository.folder),
        "PATH_INFO": f"/{request.route}",
        "GIT_HTTP_EXPORT_ALL": "1",
        "REQUEST_METHOD": scope["method"],
        "QUERY_STRING": scope["query_string"].decode("latin-1"),
        "REMOTE_USER": "hub",
        "REMOTE_ADDR": scope["client"][0] if scope.get("client") else "",
        "CONTENT_LENGTH": str(num_bytes),
        "CONTENT_TYPE": _header(scope, b"content-type").decode("latin-1"),
    }
    if encoding := _header(scope, b"content-encoding"):
        cgi["HTTP_CONTENT_ENCODING"] = encoding.decode("latin-1")
    if protocol := _header(scope, b"git-protocol"):
        cgi["GIT_PROTOCOL"] = protocol.decode("latin-1")
    return git_environment(cgi)


def _header(scope: Scope, name: bytes) -> bytes:
    headers: Iterable[tuple[bytes, bytes]] = scope["headers"]
    return next((value for key, value in headers if key == name), b"")


async def _serve(
    environment: dict[str, str], body: IO[bytes], receive: Receive, send: Send
) -> None:
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
        await _send_start(send, *_parse_head(head))
        while chunk := await process.stdout.read(_CHUNK_BYTES):
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await _send_end(send, b"")
    finally:
        gone.cancel()
        _kill(process)
        await process.wait()


async def _kill_on_disconnect(process: asyncio.subprocess.Process, receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
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


def _parse_head(head: bytes) -> tuple[int, Headers]:
    """A CGI head (RFC 3875, 6.3) as status and ASGI headers."""
    status, headers = 200, []
    for line in head.strip().split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"status":
            status = int(value.split()[0])
        else:
            headers.append((name.lower(), value.strip()))
    return status, headers


async def _send_start(send: Send, status: int, headers: Headers) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def _send_end(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body})


async def _send_error(send: Send, error: RequestError) -> None:
    """In plain text, which git prints as "remote: …"."""
    text = f"{error}\n".encode()
    headers = [
        (b"content-type", b"text/plain; charset=utf-8"),
        (b"content-length", str(len(text)).encode()),
    ]
    if isinstance(error, Unauthorized):
        headers.append((b"www-authenticate", b'Basic realm="hub"'))
    await _send_start(send, error.status, headers)
    await _send_end(send, text)
