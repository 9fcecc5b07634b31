"""Answers git's smart HTTP protocol: checks each request and hands it to `git http-backend`.

The hub receives the complete request before it starts git. So a client that stalls or goes away in
the middle of a push holds no lock and no process. Before the hub answers a push, it stores an event
for the refs that the push moved.

https://git-scm.com/docs/http-protocol, https://git-scm.com/docs/git-http-backend
"""

import asyncio
import logging
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from tempfile import TemporaryFile
from typing import IO, Literal

from sqlalchemy.exc import OperationalError
from starlette.types import Receive, Scope, Send

from pipeline.hub.database import Database
from pipeline.hub.discussions.store import open_refs
from pipeline.hub.errors import (
    BadRequest,
    DiskFull,
    RepositoryNotFound,
    RequestError,
    TooLarge,
    Unauthorized,
)
from pipeline.hub.events.log import EventLog, record_ref_changes
from pipeline.hub.git import backend
from pipeline.hub.git.cleanup import clear_repository
from pipeline.hub.http_json import disk_full
from pipeline.hub.metrics import HubMetrics
from pipeline.hub.repositories.names import RepositoryType
from pipeline.hub.repositories.refs import RefChange
from pipeline.hub.repositories.store import Repositories, Repository
from pipeline.hub.settings import HubSettings
from pipeline.hub.tokens.auth import Guard, Identity, check_sees, out_of_reach

logger = logging.getLogger(__name__)

_PATH = re.compile(
    r"/(?!api/)(?:(?P<type>dataset|space)s/)?(?:(?P<owner>[^/]+)/)?(?P<name>[^/]+?)(?:\.git)?"
    r"/(?P<route>info/refs|git-upload-pack|git-receive-pack)"
)
_SERVICES = ("git-upload-pack", "git-receive-pack")
_LS_REFS = b"0014command=ls-refs"
_SPOOL_BYTES = 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class GitRequest:
    type: RepositoryType
    owner: str | None
    """None if the URL has no owner. Such a URL means a repository of the hub's owner."""
    name: str
    route: Literal["info/refs", "git-upload-pack", "git-receive-pack"]


class _Disconnected(Exception):
    """The client went away before the hub had its complete request."""


def match(scope: Scope) -> GitRequest | None:
    """Parses the path of a request. None if git does not use this path. Checks only the path."""
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
        guard: Guard,
        repositories: Repositories,
        database: Database,
        log: EventLog,
        metrics: HubMetrics,
        remarks_on: Callable[[Repository, Sequence[RefChange]], Sequence[str]],
    ) -> None:
        self._settings = settings
        self._guard = guard
        self._repositories = repositories
        self._database = database
        self._log = log
        self._metrics = metrics
        self._remarks_on = remarks_on
        # Each slot is for one process of git. A clone keeps its slot until its client has read the
        # whole answer. Pushes have separate slots, so that no push waits for such a client.
        self._clone_slots = asyncio.Semaphore(settings.max_git_processes)
        self._push_slots = asyncio.Semaphore(settings.max_git_processes)
        # Every clone and every push begins with a list of the refs. Git makes the complete list
        # before the hub sends it, so no slow client keeps one of these slots.
        self._list_slots = asyncio.Semaphore(settings.max_git_processes)

    async def __call__(
        self, request: GitRequest, scope: Scope, receive: Receive, send: Send
    ) -> None:
        try:
            identity = await self._guard.check(scope)
            service = _check(request, scope)
            if service == "git-receive-pack":
                identity.require_write("a push")
            repository = await asyncio.to_thread(self._admit, request, identity)
            with TemporaryFile(dir=self._repositories.incoming) as body:
                await self._receive_body(receive, body)
                environment = partial(self._environment, request, scope, body.tell())
                body.seek(0)
                if request.route == "git-receive-pack":
                    await self._push(request, identity, environment, body, send)
                    return
                variables = await asyncio.to_thread(environment, repository)
                if request.route == "info/refs" or _asks_for_refs(body):
                    await self._list_refs(variables, body, send)
                else:
                    async with self._clone_slots:
                        await backend.serve(variables, body, receive, send)
        except _Disconnected:
            logger.info("a client went away in the middle of %s", scope["path"])
        except RequestError as error:
            await _send_error(send, error)
        except (OSError, OperationalError) as error:
            await _send_error(send, disk_full(error))

    def _admit(self, request: GitRequest, identity: Identity) -> Repository:
        """The repository that the request names. If the token does not reach it, this raises the
        same error as for a repository that does not exist."""
        named = f"{request.type} {request.owner or self._settings.owner}/{request.name}"
        try:
            repository = self._find(request)
        except RepositoryNotFound:
            if identity.is_limited:
                raise out_of_reach(identity, named) from None
            raise
        check_sees(identity, named, repository)
        return repository

    def _find(self, request: GitRequest) -> Repository:
        owner = request.owner or self._settings.owner
        with self._database.read() as connection:
            return self._repositories.find_as_git(connection, request.type, owner, request.name)

    def _environment(
        self, request: GitRequest, scope: Scope, num_bytes: int, repository: Repository
    ) -> dict[str, str]:
        with self._database.read() as connection:
            refs = open_refs(connection, repository)
        return backend.cgi_environment(request.route, repository.folder, scope, num_bytes, refs)

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
                    f"A push may send {self._settings.max_push_bytes} bytes at most: push fewer "
                    "commits at once, or raise [hub] max_push_bytes."
                )
            if waiting and (not more or len(waiting) >= _SPOOL_BYTES):
                try:
                    await asyncio.to_thread(body.write, bytes(waiting))
                    await asyncio.to_thread(body.flush)
                except OSError as error:
                    raise DiskFull(
                        f"The hub could not store the push ({error.strerror}): make room on the "
                        "hub's disk, then push again."
                    ) from error
                waiting.clear()

    async def _list_refs(self, environment: dict[str, str], body: IO[bytes], send: Send) -> None:
        async with self._list_slots:
            told = await backend.run(environment, body)
        status, headers, refs = backend.parse_answer(told)
        await backend.send_start(send, status, headers)
        await backend.send_end(send, refs)

    async def _push(
        self,
        request: GitRequest,
        identity: Identity,
        environment: Callable[[Repository], dict[str, str]],
        body: IO[bytes],
        send: Send,
    ) -> None:
        # Find the repository again under its lock. While the body came in, the repository may have
        # been removed or moved. The token may not reach the repository that has its name now. And
        # the environment names the open pull requests: one of them may have been merged, and would
        # not have the commits of this push.
        async with self._repositories.locked(partial(self._admit, request, identity)) as repository:
            variables = await asyncio.to_thread(environment, repository)
            # Git runs to its end even if the client goes away, because it may have moved refs
            # already.
            async with self._push_slots:
                status, headers, answer = await self._receive_pack(repository, variables, body)
        await backend.send_start(send, status, headers)
        await backend.send_end(send, answer)

    async def _receive_pack(
        self, repository: Repository, environment: dict[str, str], body: IO[bytes]
    ) -> tuple[int, backend.Headers, bytes]:
        told = await backend.run(environment, body)
        if not told.is_whole:
            await asyncio.to_thread(clear_repository, repository.folder)
        # The event must be on disk before the client gets git's "ok".
        changes = await asyncio.to_thread(record_ref_changes, repository, self._log)
        status, headers, answer = backend.parse_answer(told)
        # A request that moves no ref is "unchanged": git refused the push, or this is the empty
        # request that git sends before a large push.
        result = "error" if status != 200 else "ok" if changes else "unchanged"
        self._metrics.pushes.labels(result=result).inc()
        remarks = await asyncio.to_thread(self._remarks_on, repository, changes) if changes else []
        return status, headers, backend.with_remarks(answer, remarks)


def _check(request: GitRequest, scope: Scope) -> str:
    """The git service that the request asks for. Raises BadRequest."""
    service = scope["query_string"].decode("latin-1").removeprefix("service=")
    if request.route == "info/refs":
        if scope["method"] != "GET" or service not in _SERVICES:
            raise BadRequest(
                "This hub only answers git's smart HTTP protocol: use git 1.6.6 or newer."
            )
    elif scope["method"] != "POST" or backend.header(scope, b"content-type") != (
        f"application/x-{request.route}-request".encode()
    ):
        raise BadRequest(
            f"{request.route} only answers the POST that git sends: use git for this address."
        )
    return service if request.route == "info/refs" else request.route


def _asks_for_refs(body: IO[bytes]) -> bool:
    """Whether the body is the command `ls-refs`, with which a client of protocol version 2 asks for
    the refs: https://git-scm.com/docs/gitprotocol-v2"""
    # `body.read` would move the file position, and git starts to read at this position.
    return os.pread(body.fileno(), len(_LS_REFS), 0) == _LS_REFS


async def _send_error(send: Send, error: RequestError) -> None:
    """Answers in plain text: git prints each line of it after "remote: "."""
    text = f"{error}\n".encode()
    headers = [
        (b"content-type", b"text/plain; charset=utf-8"),
        (b"content-length", str(len(text)).encode()),
    ]
    if isinstance(error, Unauthorized):
        headers.append((b"www-authenticate", b'Basic realm="hub"'))
    await backend.send_start(send, error.status, headers)
    await backend.send_end(send, text)
