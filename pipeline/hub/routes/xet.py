"""The part of the Xet API that `hf_xet` needs to send files. `hf_xet` cuts files into chunks. A
xorb holds many chunks. A shard says which chunks make each file.

Clients do not read files over Xet. The route `resolve` answers without a Xet hash, so clients fetch
the files over plain HTTP.
"""

import time
from collections.abc import Sequence

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from pipeline.hub.errors import NotSupported
from pipeline.hub.http_json import hub_url
from pipeline.hub.large_files.signatures import LIFETIME_SECONDS
from pipeline.hub.large_files.xet_store import XetStore
from pipeline.hub.repositories.names import RepositoryName
from pipeline.hub.routes.transfers import body_of
from pipeline.hub.service import Hub, hub_of

PREFIX = "/api/xet/"
"""The beginning of these routes' paths. Each route first checks the Xet access token. The token is
valid for one store, a folder in which a repository keeps the xorbs that clients sent."""
_STORE = PREFIX + "{repository_id}/{store_id}"


def routes() -> list[Route]:
    return [
        Route(_STORE + "/v1/xorbs/{prefix}/{hash}", receive_xorb, methods=["POST"]),
        Route(_STORE + "/v1/shards", receive_shard, methods=["POST"]),
        Route(_STORE + "/{rest:anytext}", answer_nothing, methods=["GET", "POST"]),
    ]


async def write_token(
    request: Request, hub: Hub, name: RepositoryName, rest: Sequence[str]
) -> Response:
    """The URL to which `hf_xet` sends files for this repository, and the access token for it."""
    repository = await run_in_threadpool(hub.find, name)
    store = await run_in_threadpool(XetStore.current, repository.folder)
    expires = int(time.time()) + LIFETIME_SECONDS
    url = f"{hub_url(request)}{PREFIX}{repository.id}/{store.id}"
    token = hub.xet_tokens.make(repository.id, store.id)
    headers = {
        "X-Xet-Cas-Url": url,
        "X-Xet-Access-Token": token,
        "X-Xet-Token-Expiration": str(expires),
    }
    return JSONResponse({"casUrl": url, "accessToken": token, "exp": expires}, headers=headers)


async def refuse_reading(
    request: Request, hub: Hub, name: RepositoryName, rest: Sequence[str]
) -> Response:
    await run_in_threadpool(hub.find, name)
    raise NotSupported(
        "This hub does not send files over Xet: fetch them over plain HTTP, for example with "
        "`hf download`."
    )


async def receive_xorb(request: Request) -> Response:
    store = await _store(request)
    await store.receive_xorb(body_of(request), request.path_params["hash"])
    return JSONResponse({"was_inserted": True})


async def receive_shard(request: Request) -> Response:
    store = await _store(request)
    limit = hub_of(request).settings.max_push_bytes
    await store.receive_shard(body_of(request), max_file_bytes=limit)
    return JSONResponse({"result": 1})


async def answer_nothing(request: Request) -> Response:
    """Answers 404 for the rest of the Xet API, such as the search for chunks of other repositories.
    Clients can send files without these requests."""
    await _store(request)
    return JSONResponse({"error": "This hub only takes xorbs and shards."}, status_code=404)


async def _store(request: Request) -> XetStore:
    """The store for which the token is valid. Raises Unauthorized, and RepositoryNotFound if the
    repository does not exist any more."""
    hub = hub_of(request)
    repository_id, store_id = request.path_params["repository_id"], request.path_params["store_id"]
    header = request.headers.get("authorization", "")
    hub.xet_tokens.check(header, repository_id, store_id)
    repository = await run_in_threadpool(hub.find_by_id, repository_id)
    return XetStore(repository.folder, store_id)
