"""API routes that list, create and delete branches and tags. Each change stores an event, as a push
does."""

from collections.abc import Callable, Sequence
from typing import Annotated

from pydantic import BaseModel, ConfigDict, StringConstraints
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from pipeline.hub.contents.history import resolve_revision
from pipeline.hub.errors import BadRequest, Conflict, RevisionNotFound
from pipeline.hub.events.log import record_ref_changes
from pipeline.hub.git.process import PULL_REQUEST_PREFIX, git
from pipeline.hub.http_json import read_json
from pipeline.hub.repositories.names import DEFAULT_BRANCH, RepositoryName, is_ref_name
from pipeline.hub.repositories.refs import peeled_refs, read_refs
from pipeline.hub.repositories.store import Repository
from pipeline.hub.service import Hub
from pipeline.hub.tokens.auth import identity_of, signature

_NO_REF = "0" * 40


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
    ref = _full("refs/heads/", "/".join(rest))
    body = await read_json(request, NewBranch)

    def act(repository: Repository) -> None:
        _refuse_existing(repository, ref)
        if body.startingPoint is None and not read_refs(repository):
            raise BadRequest(
                f"The {name} has no commit yet, and a branch must begin at a commit: push a commit "
                "to the branch. The push also creates the branch."
            )
        start = resolve_revision(repository, body.startingPoint or "main")
        git(repository.folder, "update-ref", ref, start, _NO_REF)

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
    await _change_refs(request, hub, name, lambda repository: _delete(repository, ref))
    return Response(status_code=200)


async def create_tag(
    request: Request, hub: Hub, name: RepositoryName, rest: Sequence[str]
) -> Response:
    body = await read_json(request, NewTag)
    ref = _full("refs/tags/", body.tag)
    author = signature(identity_of(request))

    def act(repository: Repository) -> None:
        commit = resolve_revision(repository, "/".join(rest))
        _refuse_existing(repository, ref)
        if not body.message:
            git(repository.folder, "update-ref", ref, commit, _NO_REF)
            return
        git(
            repository.folder,
            *("tag", "-a", "-F", "-", body.tag, commit),
            stdin=body.message.encode(),
            extra=author.environment,
        )

    await _change_refs(request, hub, name, act)
    return Response(status_code=200)


async def delete_tag(
    request: Request, hub: Hub, name: RepositoryName, rest: Sequence[str]
) -> Response:
    ref = _full("refs/tags/", "/".join(rest))
    await _change_refs(request, hub, name, lambda repository: _delete(repository, ref))
    return Response(status_code=200)


async def super_squash(
    request: Request, hub: Hub, name: RepositoryName, rest: Sequence[str]
) -> Response:
    """Replaces all commits of the branch by one commit without a parent. The files of the branch
    stay the same."""
    ref = _full("refs/heads/", "/".join(rest))
    body = await read_json(request, Squash)
    author = signature(identity_of(request))

    def act(repository: Repository) -> None:
        head = resolve_revision(repository, ref)
        message = (body.message or f"Super-squash branch {ref}").encode()
        squashed = git(
            repository.folder,
            *("commit-tree", f"{head}^{{tree}}", "-F", "-"),
            stdin=message,
            extra=author.environment,
        )
        git(repository.folder, "update-ref", ref, squashed.decode().strip(), head)

    await _change_refs(request, hub, name, act)
    return JSONResponse({})


async def _change_refs(
    request: Request, hub: Hub, name: RepositoryName, act: Callable[[Repository], None]
) -> None:
    async with hub.locked(name, identity_of(request)) as repository:

        def act_and_record() -> None:
            act(repository)
            record_ref_changes(repository, hub.log)

        await run_in_threadpool(act_and_record)


def _as_json(repository: Repository, prefix: str) -> list[dict[str, str]]:
    return [
        {"name": name, "ref": f"{prefix}{name}", "targetCommit": commit}
        for name, commit in peeled_refs(repository, prefix)
    ]


def _full(prefix: str, name: str) -> str:
    if not is_ref_name(name) or name == "HEAD" or name.startswith("refs/"):
        raise BadRequest(
            f"{name!r} is not a valid name for a branch or a tag: use letters, digits, '-', '_', "
            "'.' and '/'. The names HEAD and refs/… are not allowed."
        )
    return f"{prefix}{name}"


def _refuse_existing(repository: Repository, ref: str) -> None:
    for existing in read_refs(repository):
        if existing == ref:
            raise Conflict(f"Reference {ref} already exists: choose another name.")
        if existing.startswith(f"{ref}/") or ref.startswith(f"{existing}/"):
            raise Conflict(
                f"Reference {ref} cannot exist together with {existing}, because git stores each "
                "ref as a file, and one of the two would be a folder: choose another name."
            )


def _delete(repository: Repository, ref: str) -> None:
    if ref not in read_refs(repository):
        raise RevisionNotFound(
            f"The {repository.name} has no {ref} that could be deleted: check the name."
        )
    git(repository.folder, "update-ref", "-d", ref)
