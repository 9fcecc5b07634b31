"""API routes that list, create and delete branches and tags. Each change stores an event, as a push
does."""

from typing import Annotated

from fastapi import APIRouter
from pydantic import BaseModel, StringConstraints

from pipeline.hub.contents import resolve_revision
from pipeline.hub.errors import BadRequest, Conflict, RevisionNotFound
from pipeline.hub.events import record_ref_changes
from pipeline.hub.git import NO_REF, PULL_REQUEST_PREFIX, git
from pipeline.hub.http_json import Json, json_body
from pipeline.hub.repositories import (
    DEFAULT_BRANCH,
    SHA,
    Repository,
    is_ref_name,
    peeled_refs,
    read_refs,
)
from pipeline.hub.routes.access import API, Locked, Readable, Writer
from pipeline.hub.service import Hub, HubOf
from pipeline.hub.tokens import signature

Message = Annotated[str, StringConstraints(pattern=r"^[^\x00]*$")]
"""The message of a commit or a tag. Git allows no NUL character in it."""

router = APIRouter(prefix=API)


class NewBranch(BaseModel):
    startingPoint: str | None = None


class Squash(BaseModel):
    message: Message | None = None


class NewTag(BaseModel):
    tag: str
    message: Message | None = None


@router.get("/refs")
def list_refs(repository: Readable, include_prs: bool = False) -> Json:
    return {
        "branches": _as_json(repository, "refs/heads/"),
        "tags": _as_json(repository, "refs/tags/"),
        "converts": [],
        "pullRequests": _as_json(repository, PULL_REQUEST_PREFIX) if include_prs else [],
    }


@router.post("/branch/{branch:rest}")
def create_branch(
    hub: HubOf,
    body: Annotated[NewBranch, json_body(NewBranch)],
    repository: Locked,
    branch: str,
) -> None:
    """The branch begins at `startingPoint`, by default at the newest commit of `main`."""
    ref = _new(repository, "refs/heads/", branch)
    commit = resolve_revision(repository, body.startingPoint or "main")
    git(repository.folder, "update-ref", ref, commit, NO_REF)
    record_ref_changes(repository, hub.log)


@router.delete("/branch/{branch:rest}")
def delete_branch(hub: HubOf, repository: Locked, branch: str) -> None:
    ref = _full("refs/heads/", branch)
    if ref == DEFAULT_BRANCH:
        raise BadRequest(f"Cannot delete {DEFAULT_BRANCH}: delete the repository instead.")
    _delete(hub, repository, ref)


@router.post("/tag/{revision:rest}")
def create_tag(
    hub: HubOf,
    identity: Writer,
    body: Annotated[NewTag, json_body(NewTag)],
    repository: Locked,
    revision: str,
) -> None:
    """Creates an annotated tag if there is a `message`."""
    commit = resolve_revision(repository, revision)
    ref = _new(repository, "refs/tags/", body.tag)
    if body.message:
        git(
            repository.folder,
            # By default, git would remove lines that begin with `#`, such as titles in Markdown.
            *("tag", "-a", "--cleanup=verbatim", "-F", "-", body.tag, commit),
            stdin=f"{body.message}\n".encode(),
            extra=signature(identity).environment,
        )
    else:
        git(repository.folder, "update-ref", ref, commit, NO_REF)
    record_ref_changes(repository, hub.log)


@router.delete("/tag/{tag:rest}")
def delete_tag(hub: HubOf, repository: Locked, tag: str) -> None:
    _delete(hub, repository, _full("refs/tags/", tag))


@router.post("/super-squash/{branch:rest}")
def super_squash(
    hub: HubOf,
    identity: Writer,
    body: Annotated[Squash, json_body(Squash)],
    repository: Locked,
    branch: str,
) -> Json:
    """Replaces all commits of the branch by one commit without a parent. The files of the branch
    stay the same."""
    ref = _full("refs/heads/", branch)
    head = resolve_revision(repository, ref)
    squashed = git(
        repository.folder,
        *("commit-tree", f"{head}^{{tree}}", "-F", "-"),
        stdin=(body.message or f"Super-squash branch {ref}").encode(),
        extra=signature(identity).environment,
    )
    git(repository.folder, "update-ref", ref, squashed.decode().strip(), head)
    record_ref_changes(repository, hub.log)
    return {}


def _delete(hub: Hub, repository: Repository, ref: str) -> None:
    if ref not in read_refs(repository):
        raise RevisionNotFound(f"The {repository.name} has no {ref}: check the name.")
    git(repository.folder, "update-ref", "-d", ref)
    record_ref_changes(repository, hub.log)


def _as_json(repository: Repository, prefix: str) -> list[dict[str, str]]:
    return [
        {"name": name, "ref": f"{prefix}{name}", "targetCommit": commit}
        for name, commit in peeled_refs(repository, prefix)
    ]


def _new(repository: Repository, prefix: str, name: str) -> str:
    if SHA.fullmatch(name):
        raise BadRequest(f"{name!r} has the form of a commit's sha: choose another name.")
    ref = _full(prefix, name)
    for existing in read_refs(repository):
        if existing == ref:
            raise Conflict(f"Reference {ref} already exists: choose another name.")
        if existing.startswith(f"{ref}/") or ref.startswith(f"{existing}/"):
            # Git stores each ref as a file, and one of the two would be a folder. This is no
            # Conflict: with `exist_ok`, a client takes status 409 to mean that `ref` exists.
            raise BadRequest(
                f"Reference {ref} cannot exist together with {existing}: choose another name."
            )
    return ref


def _full(prefix: str, name: str) -> str:
    if not is_ref_name(name) or name == "HEAD" or name.startswith("refs/"):
        raise BadRequest(
            f"{name!r} is not a valid name for a branch or a tag: use letters, digits, '-', '_', "
            "'.' and '/', and at most 250 bytes between two '/'. The names HEAD and refs/… are not "
            "allowed."
        )
    return f"{prefix}{name}"
