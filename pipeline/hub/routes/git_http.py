"""Answers git's smart HTTP protocol: checks each request and hands it to `git http-backend`.

The hub receives the complete request before it starts git. So a client that stalls or goes away in
the middle of a push holds no lock and no process. Before the hub answers a push, it stores an event
for the refs that the push moved.

https://git-scm.com/docs/http-protocol, https://git-scm.com/docs/git-http-backend
"""

import os
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import IO

from fastapi import APIRouter, Depends
from starlette.background import BackgroundTask
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from pipeline.hub import git
from pipeline.hub.errors import BadRequest
from pipeline.hub.events import record_ref_changes
from pipeline.hub.git import clear_repository
from pipeline.hub.http_json import GIT_SERVICES, hub_url
from pipeline.hub.repositories import Repository, open_bases
from pipeline.hub.service import FILES, Hub, HubOf, Named, Readable, Received, Who, readable

_LS_REFS = b"0014command=ls-refs"


async def _check(request: Request, identity: Who) -> None:
    """Raises BadRequest if the request is not git's. Raises Forbidden if it belongs to a push, and
    the token may not write."""
    service = request.url.path.rpartition("/")[2]
    is_git = request.headers.get("content-type") == f"application/x-{service}-request"
    if service == "refs":
        service = request.query_params.get("service", "")
        is_git = service in GIT_SERVICES
    if not is_git:
        raise BadRequest("This address only answers git, from version 1.6.6.")
    if service == "git-receive-pack":
        identity.require_write("a push")


router = APIRouter(prefix=FILES, dependencies=[Depends(_check)])


@router.get("/info/refs")
async def list_refs(request: Request, hub: HubOf, repository: Readable, body: Received) -> Response:
    async with hub.git_slots["list"]:
        variables = await run_in_threadpool(_environment, hub, request, repository, body)
        status, headers, answer = git.parse_answer(
            await run_in_threadpool(git.run, variables, body)
        )
    return _with_headers(Response(answer, status), headers)


@router.post("/git-upload-pack")
async def clone(request: Request, hub: HubOf, repository: Readable, body: Received) -> Response:
    if _asks_for_refs(body):
        return await list_refs(request, hub, repository, body)
    variables = await run_in_threadpool(_environment, hub, request, repository, body)
    pieces = _clone(hub, variables, body)
    status, headers = git.parse_head(await anext(pieces))
    # A client that stops reading leaves the generator before its end.
    closing = BackgroundTask(pieces.aclose)
    return _with_headers(StreamingResponse(pieces, status, background=closing), headers)


async def _clone(
    hub: Hub, variables: dict[str, str], body: IO[bytes]
) -> AsyncGenerator[bytes, None]:
    """Git's answer to a clone, while git writes it. Has a slot until the client has read it."""
    async with hub.git_slots["clone"], aclosing(git.stream(variables, body)) as pieces:
        async for piece in pieces:
            yield piece


@router.post("/git-receive-pack", dependencies=[Depends(readable)])
async def push(request: Request, hub: HubOf, name: Named, body: Received) -> Response:
    # Find the repository again under its lock: while the body came in, it may have been removed or
    # moved. Make the environment under the lock too, because it names the open pull requests: a
    # push to one that was merged meanwhile would never reach its branch.
    async with hub.locked(name) as repository, hub.git_slots["push"]:
        variables = await run_in_threadpool(_environment, hub, request, repository, body)
        # Git runs to its end even if the client goes away, because it may have moved refs already.
        done = await run_in_threadpool(git.run, variables, body)
        if done.returncode != 0:  # git may have left locks
            await run_in_threadpool(clear_repository, repository.folder)
        # The event must be on disk before the client gets git's "ok".
        changes = await run_in_threadpool(record_ref_changes, repository, hub.log)
        status, headers, answer = git.parse_answer(done)
        remarks = [*await run_in_threadpool(hub.remarks, repository, changes)]
    if repository.name.type == "dataset":
        url = f"{hub_url(request)}/{repository.name.path}/commit"
        branches = [each for each in changes if each.ref.startswith("refs/heads/") and each.new_sha]
        remarks += [f"What becomes of it: {url}/{each.new_sha}" for each in branches]
    return _with_headers(Response(git.with_remarks(answer, remarks), status), headers)


def _environment(
    hub: Hub, request: Request, repository: Repository, body: IO[bytes]
) -> dict[str, str]:
    refs = open_bases(hub.database, repository)
    return git.cgi_environment(request, repository.folder, body, refs)


def _with_headers(answer: Response, headers: git.Headers) -> Response:
    answer.raw_headers = headers
    return answer


def _asks_for_refs(body: IO[bytes]) -> bool:
    """Whether the body is the command `ls-refs`, with which a client of protocol version 2 asks for
    the refs: https://git-scm.com/docs/gitprotocol-v2"""
    # `body.read` would move the file position, and git starts to read at this position.
    return os.pread(body.fileno(), len(_LS_REFS), 0) == _LS_REFS
