"""Routes that receive and send the content of large files, at URLs that the hub has signed.

`huggingface_hub` sends no token with a file, so the signature of the URL replaces the token. A
signature is valid for some hours, and only for one method, repository, file and size.
"""

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from pipeline.hub.cipher import Cipher
from pipeline.hub.errors import Forbidden, NotFound
from pipeline.hub.http_json import pieces
from pipeline.hub.large_files.store import LargeFiles
from pipeline.hub.repositories.store import Repository
from pipeline.hub.routes import file_answers
from pipeline.hub.service import HubOf

PREFIX = "/api/lfs/"
"""The beginning of these routes' paths. Each route first checks the signature of its URL; none
needs a token."""

router = APIRouter(prefix=PREFIX + "{repository_id}/objects/{oid}")


def object_path(repository: Repository, oid: str) -> str:
    return f"{PREFIX}{repository.id}/objects/{oid}"


def sign(cipher: Cipher, method: str, path: str, size: int) -> str:
    """The path with a query that has the size in bytes and the signature."""
    return f"{path}?size={size}&signature={cipher.grant(method, path, str(size))}"


def _signed(request: Request, hub: HubOf, repository_id: str) -> tuple[LargeFiles, int]:
    """The large files of the repository, and the signed size. Raises Forbidden if the URL is not
    valid, and RepositoryNotFound if the repository does not exist any more."""
    method = "GET" if request.method == "HEAD" else request.method
    size, signature = (request.query_params.get(name, "") for name in ("size", "signature"))
    if hub.cipher.read_grant(signature) != [method, request.scope["path"], size]:
        raise Forbidden(
            "The signature of this URL is wrong, or it has expired: ask the batch route of Git LFS "
            "for a new URL."
        )
    return LargeFiles(hub.find_by_id(repository_id).folder), int(size)


Signed = Annotated[tuple[LargeFiles, int], Depends(_signed)]


@router.get("")
def fetch(request: Request, signed: Signed, oid: str) -> Response:
    files, _ = signed
    size = files.size(oid)
    if size is None:
        raise NotFound(
            f"The hub does not have the large file {oid} any more: push it from a clone that has "
            "it."
        )
    return file_answers.answer(request, size, {"ETag": f'"{oid}"'}, partial(files.read, oid))


@router.put("")
async def send(request: Request, signed: Signed, oid: str) -> Response:
    files, size = signed
    await files.receive(pieces(request), oid, size)
    return Response(headers={"ETag": f'"{oid}"'})
