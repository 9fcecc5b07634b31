"""API: the routes by which the client would upload. They answer how to push instead."""

from collections.abc import Sequence

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from pipeline.hub.errors import BadRequest
from pipeline.hub.http_json import hub_url
from pipeline.hub.names import RepositoryName
from pipeline.hub.service import Hub


async def refuse_upload(
    request: Request, hub: Hub, name: RepositoryName, rest: Sequence[str]
) -> Response:
    """Always raises: BadRequest, which the client shows and does not retry."""
    await run_in_threadpool(hub.find, name)
    url = f"{hub_url(request)}/{name.path}"
    raise BadRequest(
        "This hub takes commits by git only, use git push: "
        f"`git clone {url}`, add the files, commit, `git push`."
    )


async def refuse_lfs(request: Request, hub: Hub, name: RepositoryName) -> Response:
    """In the shape that `git lfs` prints."""
    await run_in_threadpool(hub.find, name)
    message = (
        "This hub keeps no LFS objects, use git push without git-lfs: "
        "`git lfs uninstall --local`, remove the filter lines from .gitattributes, commit, push."
    )
    return JSONResponse(
        {"message": message, "error": message},
        status_code=400,
        media_type="application/vnd.git-lfs+json",
        headers={"X-Error-Message": message},
    )
