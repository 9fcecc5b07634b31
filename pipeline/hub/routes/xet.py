"""The part of the Xet API that `hf_xet` needs to send files. `hf_xet` cuts files into chunks. A
xorb holds many chunks. A shard says which chunks make each file.

Clients do not read files over Xet. The route `resolve` answers without a Xet hash, so clients fetch
the files over plain HTTP.
"""

import time
from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import JSONResponse

from pipeline.hub.cipher import GRANT_SECONDS
from pipeline.hub.errors import Unauthorized
from pipeline.hub.http_json import Json, chunks, hub_url
from pipeline.hub.routes.access import API, Readable, writer
from pipeline.hub.service import HubOf
from pipeline.hub.xet import MAX_SHARD_BYTES, MAX_XORB_BYTES, XetStore

PREFIX = "/api/xet/"
"""The beginning of the routes that need no token of the hub. Each first checks the Xet access
token. It is valid for one store, a folder in which a repository keeps the xorbs that clients
sent."""

api = APIRouter(prefix=API)
router = APIRouter(prefix=PREFIX + "{repository_id}/{store_id}")


@api.get("/xet-write-token/{revision:rest}", dependencies=[Depends(writer)])
def write_token(request: Request, hub: HubOf, repository: Readable) -> Json:
    """The URL to which `hf_xet` sends files for this repository, and the access token for it."""
    store = XetStore.current(repository.folder)
    return {
        "casUrl": f"{hub_url(request)}{PREFIX}{repository.id}/{store.id}",
        "accessToken": hub.cipher.grant("xet", repository.id, store.id),
        "exp": int(time.time()) + GRANT_SECONDS,
    }


def _store(request: Request, hub: HubOf, repository_id: str, store_id: str) -> XetStore:
    """The store for which the token is valid. Raises Unauthorized, and RepositoryNotFound if the
    repository does not exist any more."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    granted = hub.cipher.read_grant(token)
    if scheme.lower() != "bearer" or granted != ["xet", repository_id, store_id]:
        raise Unauthorized(  # after which the client asks for a new token
            "This is not an access token of this hub for this Xet store, or it has expired: ask "
            "for a new one."
        )
    return XetStore(hub.find_by_id(repository_id).folder, store_id)


Store = Annotated[XetStore, Depends(_store)]


@router.post("/v1/xorbs/{prefix}/{hash}")
async def receive_xorb(request: Request, store: Store, hash: str) -> Json:
    await store.receive_xorb(chunks(request, max_bytes=MAX_XORB_BYTES), hash)
    return {"was_inserted": True}


@router.post("/v1/shards")
async def receive_shard(request: Request, hub: HubOf, store: Store) -> Json:
    limit = hub.settings.max_push_bytes
    await store.receive_shard(chunks(request, max_bytes=MAX_SHARD_BYTES), max_file_bytes=limit)
    return {"result": 1}


@router.api_route("/{rest:rest}", methods=["GET", "POST"])
def answer_nothing(_: Store) -> JSONResponse:
    """Answers 404 for the rest of the Xet API, such as the search for chunks of other repositories.
    Clients can send files without these requests."""
    return JSONResponse({"error": "This hub only takes xorbs and shards."}, status_code=404)
