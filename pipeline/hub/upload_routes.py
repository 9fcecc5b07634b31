"""API: the routes by which the client would upload. They answer how to push instead."""

from collections.abc import Sequence

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

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
