"""The content of large files, to and from the hub, by URLs that the hub signed.

`huggingface_hub` shows no token when it sends a file, so the URL is the proof: it is good for one
method, one repository, one file, one size, and some hours.
"""

from collections.abc import AsyncIterator
from functools import partial

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from pipeline.hub import file_answers
from pipeline.hub.errors import BadRequest, LargeFileNotFound
from pipeline.hub.http_json import read_body
from pipeline.hub.large_files import LargeFiles
from pipeline.hub.partial_uploads import PartialUpload
from pipeline.hub.repositories import Repository
from pipeline.hub.service import hub_of

PREFIX = "/api/lfs/"
"""Below it every route checks the signature of its URL first, and nothing asks for a token."""


def routes() -> list[Route]:
    file = PREFIX + "{repository_id}/objects/{oid}"
    upload = PREFIX + "{repository_id}/uploads/{upload_id}/{oid}"
    return [
        Route(file, fetch, methods=["GET"]),
        Route(file, send, methods=["PUT"]),
        Route(file, verify, methods=["POST"]),
        Route(upload + "/{start}", send_part, methods=["PUT"]),
        Route(upload, complete, methods=["POST"]),
    ]


def object_path(repository: Repository, oid: str) -> str:
    return f"{PREFIX}{repository.id}/objects/{oid}"


def upload_path(repository: Repository, oid: str, upload_id: str) -> str:
    return f"{PREFIX}{repository.id}/uploads/{upload_id}/{oid}"


async def fetch(request: Request) -> Response:
    files, oid, _ = await _signed(request)
    size = await run_in_threadpool(files.size, oid)
    if size is None:
        raise LargeFileNotFound(f"{oid} is not here any more: push it again.")
    return file_answers.answer(request, size, {"ETag": f'"{oid}"'}, partial(files.read, oid))


async def send(request: Request) -> Response:
    files, oid, size = await _signed(request)
    await files.receive(body_of(request), oid, size)
    return Response(headers={"ETag": f'"{oid}"'})


async def verify(request: Request) -> Response:
    """Whether the file came whole: clients ask once they have sent it."""
    files, oid, size = await _signed(request)
    await read_body(request)
    found = await run_in_threadpool(files.size, oid)
    if found != size:
        raise LargeFileNotFound(f"{oid} is not here with its {size} bytes: send it again.")
    return JSONResponse({})


async def send_part(request: Request) -> Response:
    files, _, size = await _signed(request)
    start = int(request.path_params["start"])  # of a path that the hub signed
    upload = PartialUpload(files, request.path_params["upload_id"])
    await upload.receive(body_of(request), start=start, size=size)
    # The client hands the tags of all parts back; the sha256 of the whole file says more.
    return Response(headers={"ETag": f'"{start}-{size}"'})


async def complete(request: Request) -> Response:
    files, oid, size = await _signed(request)
    await read_body(request)
    upload = PartialUpload(files, request.path_params["upload_id"])
    await run_in_threadpool(upload.complete, oid, size)
    return JSONResponse({})


async def _signed(request: Request) -> tuple[LargeFiles, str, int]:
    """The store, the file and the size that the URL is good for. Raises Forbidden, and
    RepositoryNotFound where the repository was removed meanwhile."""
    hub = hub_of(request)
    size = hub.signed_urls.check(request)
    repository = await run_in_threadpool(hub.find_by_id, request.path_params["repository_id"])
    return LargeFiles(repository.folder), request.path_params["oid"], size


async def body_of(request: Request) -> AsyncIterator[bytes]:
    """Raises BadRequest for a client that goes away."""
    try:
        async for piece in request.stream():
            yield piece
    except ClientDisconnect:
        raise BadRequest("The request's body ended early.") from None
