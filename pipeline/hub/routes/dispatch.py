"""Finds the route for each request of the API. If the request is about a repository, the word after
the repository's name, the verb, selects the route.

The paths are the same as on the Hugging Face Hub: `/api/datasets/<owner>/<name>/<verb>/…`, and for
the bytes of a file `/datasets/<owner>/<name>/resolve/…`.
"""

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from pipeline.hub import unsupported
from pipeline.hub.repositories.names import RepositoryName, segments
from pipeline.hub.routes import (
    activity,
    commits,
    contents,
    discussions,
    lfs,
    listing,
    maintenance,
    pages,
    refs,
    repositories,
    spaces,
    tokens,
    webhooks,
    xet,
)
from pipeline.hub.routes.paths import api_path, file_path_of, type_of
from pipeline.hub.service import Hub, hub_of
from pipeline.hub.tokens import auth

_READ = {
    "revision": contents.describe,
    "tree": contents.tree,
    "commits": contents.commits,
    "discussions": discussions.read,
    "secrets": spaces.show,
    "variables": spaces.show,
    "xet-write-token": xet.write_token,
    "xet-read-token": xet.refuse_reading,
}
_POST = {
    "paths-info": contents.paths_info,
    "branch": refs.create_branch,
    "tag": refs.create_tag,
    "super-squash": refs.super_squash,
    "preupload": commits.preupload,
    "commit": commits.commit,
    "discussions": discussions.change,
    "lfs-files": lfs.duplicate,
    "secrets": spaces.put,
    "variables": spaces.put,
}
_DELETE = {
    "branch": refs.delete_branch,
    "tag": refs.delete_tag,
    "secrets": spaces.remove,
    "variables": spaces.remove,
}
_BY_METHOD = {"GET": _READ, "HEAD": _READ, "POST": _POST, "DELETE": _DELETE}
VERBS = frozenset({"refs", "settings", "auth-check"}).union(*_BY_METHOD.values())


def routes() -> list[Route]:
    return [
        *tokens.routes(),
        *commits.routes(),
        *listing.routes(),
        *repositories.routes(),
        *webhooks.routes(),
        *activity.routes(),
        *maintenance.routes(),
        *pages.routes(),
        Route("/api/{rest:anytext}", api, methods=["GET", "POST", "PUT", "DELETE"]),
        Route("/{rest:anytext}", files, methods=["GET", "POST"]),
    ]


async def api(request: Request) -> Response:
    """Answers `/api/<type>s`, and `/api/<type>s/[<owner>/]<name>[/<verb>/…]`."""
    hub = hub_of(request)
    parts = segments(request.scope["raw_path"])
    type = type_of(parts[1] if len(parts) > 1 else "")
    if type is None or request.url.path in unsupported.BESIDE_REPOSITORIES:
        raise HTTPException(404)
    if len(parts) == 2 and request.method in ("GET", "HEAD"):
        return await listing.list_repositories(request, hub, type)
    path = await run_in_threadpool(
        api_path, request.scope["raw_path"], VERBS, hub.settings.owner, hub.is_there
    )
    verb, *arguments = path.rest or ("",)
    return await _call(request, hub, path.name, verb, arguments)


async def _call(
    request: Request, hub: Hub, name: RepositoryName, verb: str, arguments: list[str]
) -> Response:
    method = request.method
    if verb == "xet-write-token":  # a GET, but its answer is a token for sending files
        auth.identity_of(request).require_write(f"{method} {request.url.path}")
    if verb == "" and method in ("GET", "HEAD"):
        return await contents.describe(request, hub, name, [])
    if verb == "refs" and method in ("GET", "HEAD"):
        return await refs.list_refs(request, hub, name)
    if verb == "settings" and method == "PUT":
        return await repositories.change_settings(request, hub, name)
    if verb == "auth-check" and method == "GET":
        if arguments:
            auth.identity_of(request).require_write("a write to the repository")
        await run_in_threadpool(hub.find, name)
        return JSONResponse({})
    handler = _BY_METHOD.get(method, {}).get(verb)
    if handler is None:
        # A missing repository comes first: the verb may be the name of the repository that the
        # client looks for, such as `logs` in `/api/models/local/logs`.
        await run_in_threadpool(hub.find, name)
        raise HTTPException(404)
    return await handler(request, hub, name, arguments)


async def files(request: Request) -> Response:
    """Answers `[<type>s/][<owner>/]<name>/{resolve,raw}/<revision>/<path>`, and `info/lfs/…` of a
    repository for `git lfs`."""
    hub = hub_of(request)
    path = await run_in_threadpool(
        file_path_of, request.scope["raw_path"], hub.settings.owner, hub.is_there
    )
    if path is None:
        raise HTTPException(404)
    verb, *arguments = path.rest or ("",)
    if verb in ("resolve", "raw") and arguments and request.method in ("GET", "HEAD"):
        read = contents.resolve if verb == "resolve" else contents.raw
        return await read(request, hub, path.name, arguments[0], arguments[1:])
    if verb == "info" and arguments[:1] == ["lfs"]:
        return await lfs.answer(request, hub, path.name, arguments[1:])
    raise HTTPException(404)
