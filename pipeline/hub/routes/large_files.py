"""Receives and sends large files.

The batch API of Git LFS tells a client which files to send or fetch, and at which URLs.
`huggingface_hub` sends no token with a file, so the signature of the URL replaces the token. A
signature is valid for some hours, and only for one method, repository, file and size.
https://github.com/git-lfs/git-lfs/blob/main/docs/api/README.md

`hf_xet` sends files by a part of the Xet API: it cuts files into chunks. A xorb holds many chunks,
and a shard says which chunks make each file. Clients do not read files over Xet: the route
`resolve` answers without a Xet hash, so clients fetch the files over plain HTTP.
"""

import time
from typing import Annotated, Literal

from fastapi import APIRouter, Depends
from pydantic import BaseModel, Field, StringConstraints
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from pipeline.formats import OID
from pipeline.hub.errors import Forbidden, NotFound, Unauthorized
from pipeline.hub.http_json import Json, chunks, file_answer, hub_url, json_body
from pipeline.hub.large_files import LargeFiles
from pipeline.hub.repositories import Repository
from pipeline.hub.service import API, FILES, Hub, HubOf, Readable, Who, grant, granted, writer
from pipeline.hub.xet import MAX_SHARD_BYTES, MAX_XORB_BYTES, XetStore

GRANT_SECONDS = 6 * 3600
"""How long a grant is valid. The hub checks this only when a transfer begins, so the transfer
itself may take longer."""
_MAX_OBJECTS = 10_000

_TRANSFERS = "/api/lfs/{repository_id}/objects/{oid}"
_XET = "/api/xet/"

router = APIRouter()
transfers = APIRouter(prefix=_TRANSFERS)
"""The routes of the signed URLs. Each first checks the signature; none needs a token."""
xet = APIRouter(prefix=_XET + "{repository_id}/{store_id}")
"""The routes that need no token of the hub. Each first checks the Xet access token. It is valid for
one store, a folder in which a repository keeps the xorbs that clients sent."""


def _is_granted(hub: Hub, text: str, *facts: str) -> bool:
    """Whether the hub made this text for these facts, at most `GRANT_SECONDS` ago."""
    return granted(hub.secret_key, text, GRANT_SECONDS) == " ".join(facts)


class LargeObject(BaseModel):
    oid: Annotated[str, StringConstraints(pattern=f"^{OID.pattern}$")]
    size: int = Field(ge=0)


class Batch(BaseModel):
    operation: Literal["upload", "download"]
    objects: tuple[LargeObject, ...] = Field(max_length=_MAX_OBJECTS)
    hash_algo: Literal["sha256"] = "sha256"


@router.post(f"{FILES}/info/lfs/objects/batch")
def offer(
    request: Request,
    hub: HubOf,
    identity: Who,
    batch: Annotated[Batch, json_body(Batch)],
    repository: Readable,
) -> JSONResponse:
    if batch.operation == "upload":
        identity.require_write("an upload of large files")
    url = hub_url(request)
    objects = [_answer(hub, repository, url, batch, each) for each in batch.objects]
    return JSONResponse(
        {"transfer": "basic", "objects": objects, "hash_algo": "sha256"},
        media_type="application/vnd.git-lfs+json",
    )


def _answer(hub: Hub, repository: Repository, url: str, batch: Batch, wanted: LargeObject) -> Json:
    """The hub's answer for one file of a batch."""
    told: Json = {"oid": wanted.oid, "size": wanted.size}
    files, limit = LargeFiles(repository.folder), hub.settings.max_push_bytes
    if (size := files.size(wanted.oid)) not in (None, wanted.size):
        message = f"The file with this sha256 has {size} bytes: send the file's true size."
        return {**told, "error": {"code": 422, "message": message}}
    if batch.operation == "upload":
        method = "PUT"
        if files.keep(wanted.oid):
            return told
        if wanted.size > limit:
            message = f"A file may have {limit} bytes at most: raise [hub] max_push_bytes."
            return {**told, "error": {"code": 422, "message": message}}
    else:
        method = "GET"
        if size is None:
            missing = f"The {repository.name} does not have this large file"
            message = f"{missing}: push it from a clone that has it."
            return {**told, "error": {"code": 404, "message": message}}
    path = _TRANSFERS.format(repository_id=repository.id, oid=wanted.oid)
    href = f"{url}{sign(hub.secret_key, method, path, wanted.size)}"
    actions = {batch.operation: {"href": href, "expires_in": GRANT_SECONDS}}
    # "authenticated" says that the client needs no token for these URLs. They are signed.
    return {**told, "authenticated": True, "actions": actions}


def sign(key: bytes, method: str, path: str, size: int) -> str:
    """The path with a query that has the size in bytes and the signature."""
    return f"{path}?size={size}&signature={grant(key, method, path, str(size))}"


def _signed(request: Request, hub: HubOf, repository_id: str) -> tuple[LargeFiles, int]:
    """The large files of the repository, and the signed size. Raises Forbidden if the URL is not
    valid, and RepositoryNotFound if the repository does not exist any more."""
    size, signature = (request.query_params.get(name, "") for name in ("size", "signature"))
    if not _is_granted(hub, signature, request.method, request.scope["path"], size):
        raise Forbidden(
            "The signature of this URL is wrong, or it has expired: ask the batch route of Git LFS "
            "for a new URL."
        )
    return LargeFiles(hub.repositories.find_by_id(repository_id).folder), int(size)


Signed = Annotated[tuple[LargeFiles, int], Depends(_signed)]


@transfers.get("")
def fetch(signed: Signed, oid: str) -> Response:
    files, _ = signed
    if files.size(oid) is None:
        raise NotFound(
            f"The hub does not have the large file {oid} any more: push it from a clone that has "
            "it."
        )
    return file_answer(files.path(oid), oid)


@transfers.put("")
async def send(request: Request, signed: Signed, oid: str) -> Response:
    files, size = signed
    await files.receive(chunks(request), oid, size)
    return Response(headers={"ETag": f'"{oid}"'})


@router.get(f"{API}/xet-write-token/{{revision:rest}}", dependencies=[Depends(writer)])
def write_token(request: Request, hub: HubOf, repository: Readable) -> Json:
    """The URL to which `hf_xet` sends files for this repository, and the access token for it."""
    store = XetStore.current(repository.folder)
    return {
        "casUrl": f"{hub_url(request)}{_XET}{repository.id}/{store.id}",
        "accessToken": grant(hub.secret_key, "xet", repository.id, store.id),
        "exp": int(time.time()) + GRANT_SECONDS,
    }


def _store(request: Request, hub: HubOf, repository_id: str, store_id: str) -> XetStore:
    """The store for which the token is valid. Raises Unauthorized, and RepositoryNotFound if the
    repository does not exist any more."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    is_granted = _is_granted(hub, token, "xet", repository_id, store_id)
    if scheme.lower() != "bearer" or not is_granted:
        raise Unauthorized(  # after which the client asks for a new token
            "This is not an access token of this hub for this Xet store, or it has expired: ask "
            "for a new one."
        )
    return XetStore(hub.repositories.find_by_id(repository_id).folder, store_id)


Store = Annotated[XetStore, Depends(_store)]


@xet.post("/v1/xorbs/{prefix}/{hash}")
async def receive_xorb(request: Request, store: Store, hash: str) -> Json:
    await store.receive_xorb(chunks(request, max_bytes=MAX_XORB_BYTES), hash)
    return {"was_inserted": True}


@xet.post("/v1/shards")
async def receive_shard(request: Request, hub: HubOf, store: Store) -> Json:
    limit = hub.settings.max_push_bytes
    await store.receive_shard(chunks(request, max_bytes=MAX_SHARD_BYTES), max_file_bytes=limit)
    return {"result": 1}


@xet.api_route("/{rest:rest}", methods=["GET", "POST"])
def answer_nothing(_: Store) -> JSONResponse:
    """Answers 404 for the rest of the Xet API, such as the search for chunks of other repositories.
    Clients can send files without these requests."""
    return JSONResponse({"error": "This hub only takes xorbs and shards."}, status_code=404)
