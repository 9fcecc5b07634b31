"""Routes that receive and send the content of large files, at URLs that the hub has signed.

`huggingface_hub` sends no token with a file, so the signature of the URL replaces the token. A
signature is valid for some hours, and only for one method, repository, file and size.
"""

from collections.abc import AsyncIterator
from functools import partial

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from pipeline.hub.errors import BadRequest, LargeFileNotFound
from pipeline.hub.http_json import read_body
from pipeline.hub.large_files.store import LargeFiles
from pipeline.hub.repositories.store import Repository
from pipeline.hub.routes import file_answers
from pipeline.hub.service import hub_of

PREFIX = "/api/lfs/"
"""The beginning of these routes' paths. Each route first checks the signature of its URL; none
needs a token."""


def routes() -> list[Route]:
    file = PREFIX + "{repository_id}/objects/{oid}"
    return [
        Route(file, fetch, methods=["GET"]),
        Route(file, send, methods=["PUT"]),
        Route(file, verify, methods=["POST"]),
    ]


def object_path(repository: Repository, oid: str) -> str:
    return f"{PREFIX}{repository.id}/objects/{oid}"


async def fetch(request: Request) -> Response:
    files, oid, _ = await _signed(request)
    size = await run_in_threadpool(files.size, oid)
    if size is None:
        raise LargeFileNotFound(
            f"The hub does not have the large file {oid} any more: push it from a clone that has "
            "it."
        )
    return file_answers.answer(request, size, {"ETag": f'"{oid}"'}, partial(files.read, oid))


async def send(request: Request) -> Response:
    files, oid, size = await _signed(request)
    await files.receive(body_of(request), oid, size)
    return Response(headers={"ETag": f'"{oid}"'})


async def verify(request: Request) -> Response:
    """Checks that the complete file is stored. Clients call this after they have sent a file."""
    files, oid, size = await _signed(request)
    await read_body(request)
    found = await run_in_threadpool(files.size, oid)
    if found != size:
        raise LargeFileNotFound(
            f"The hub does not have the large file {oid} with {size} bytes: send it again."
        )
    return JSONResponse({})


async def _signed(request: Request) -> tuple[LargeFiles, str, int]:
    """The repository's large files, and the sha256 and the size that the signed URL names. Raises
    Forbidden if the URL is not valid, and RepositoryNotFound if the repository does not exist any
    more."""
    hub = hub_of(request)
    size = hub.signed_urls.check(request.method, request.scope["path"], request.query_params)
    repository = await run_in_threadpool(hub.find_by_id, request.path_params["repository_id"])
    return LargeFiles(repository.folder), request.path_params["oid"], size


async def body_of(request: Request) -> AsyncIterator[bytes]:
    """The pieces of the body. Raises BadRequest if the client goes away."""
    try:
        async for piece in request.stream():
            yield piece
    except ClientDisconnect:
        raise BadRequest("The request's body ended too early: send the request again.") from None
