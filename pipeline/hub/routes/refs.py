"""API routes that list, create and delete branches and tags. Each change stores an event, as a push
does."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated

from pydantic import BaseModel, ConfigDict, StringConstraints
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from pipeline.hub.actions import refs as acts
from pipeline.hub.errors import BadRequest
from pipeline.hub.events.log import EventLog
from pipeline.hub.git.process import PULL_REQUEST_PREFIX
from pipeline.hub.http_json import read_json
from pipeline.hub.repositories.names import DEFAULT_BRANCH, SHA, RepositoryName, is_ref_name
from pipeline.hub.repositories.refs import peeled_refs
from pipeline.hub.repositories.store import Repository
from pipeline.hub.service import Hub
from pipeline.hub.tokens.auth import identity_of, signature


class NewBranch(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    startingPoint: str | None = None


Message = Annotated[str, StringConstraints(pattern=r"^[^\x00]*$")]
"""The message of a commit or a tag. Git allows no NUL character in it."""


class Squash(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    message: Message | None = None


class NewTag(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    tag: str
    message: Message | None = None


async def list_refs(request: Request, hub: Hub, name: RepositoryName) -> Response:
    with_prs = request.query_params.get("include_prs", "").lower() in ("1", "true")

    def read() -> dict[str, object]:
        repository = hub.find(name)
        return {
            "branches": _as_json(repository, "refs/heads/"),
            "tags": _as_json(repository, "refs/tags/"),
            "converts": [],
            "pullRequests": _as_json(repository, PULL_REQUEST_PREFIX) if with_prs else [],
        }

    return JSONResponse(await run_in_threadpool(read))


async def create_branch(
    request: Request, hub: Hub, name: RepositoryName, rest: Sequence[str]
) -> Response:
    ref = _new("refs/heads/", "/".join(rest))
    body = await read_json(request, NewBranch)
    act = partial(acts.create_branch, ref=ref, start=body.startingPoint)
    await _change_refs(request, hub, name, act)
    return Response(status_code=200)


async def delete_branch(
    request: Request, hub: Hub, name: RepositoryName, rest: Sequence[str]
) -> Response:
    ref = _full("refs/heads/", "/".join(rest))
    if ref == DEFAULT_BRANCH:
        raise BadRequest(
            f"Cannot delete {DEFAULT_BRANCH}: it is the default branch. Delete another branch, or "
            "the repository."
        )
    await _change_refs(request, hub, name, partial(acts.delete_ref, ref=ref))
    return Response(status_code=200)


async def create_tag(
    request: Request, hub: Hub, name: RepositoryName, rest: Sequence[str]
) -> Response:
    body = await read_json(request, NewTag)
    ref = _new("refs/tags/", body.tag)
    act = partial(
        acts.create_tag,
        ref=ref,
        revision="/".join(rest),
        message=body.message,
        author=signature(identity_of(request)),
    )
    await _change_refs(request, hub, name, act)
    return Response(status_code=200)


async def delete_tag(
    request: Request, hub: Hub, name: RepositoryName, rest: Sequence[str]
) -> Response:
    ref = _full("refs/tags/", "/".join(rest))
    await _change_refs(request, hub, name, partial(acts.delete_ref, ref=ref))
    return Response(status_code=200)


async def super_squash(
    request: Request, hub: Hub, name: RepositoryName, rest: Sequence[str]
) -> Response:
    ref = _full("refs/heads/", "/".join(rest))
    body = await read_json(request, Squash)
    author = signature(identity_of(request))
    act = partial(acts.super_squash, ref=ref, message=body.message, author=author)
    await _change_refs(request, hub, name, act)
    return JSONResponse({})


async def _change_refs(
    request: Request, hub: Hub, name: RepositoryName, act: Callable[[EventLog, Repository], None]
) -> None:
    async with hub.locked(name, identity_of(request)) as repository:
        await run_in_threadpool(act, hub.log, repository)


def _as_json(repository: Repository, prefix: str) -> list[dict[str, str]]:
    return [
        {"name": name, "ref": f"{prefix}{name}", "targetCommit": commit}
        for name, commit in peeled_refs(repository, prefix)
    ]


def _new(prefix: str, name: str) -> str:
    if SHA.fullmatch(name):
        raise BadRequest(
            f"{name!r} has the form of a commit's sha, so nobody could read a branch or a tag of "
            "this name: choose another name."
        )
    return _full(prefix, name)


def _full(prefix: str, name: str) -> str:
    if not is_ref_name(name) or name == "HEAD" or name.startswith("refs/"):
        raise BadRequest(
            f"{name!r} is not a valid name for a branch or a tag: use letters, digits, '-', '_', "
            "'.' and '/', and at most 250 bytes between two '/'. The names HEAD and refs/… are not "
            "allowed."
        )
    return f"{prefix}{name}"
