"""API routes that create, delete and move repositories, and change branches and tags. Each such
change stores an event, as a push does."""

from typing import Annotated

from fastapi import APIRouter, Depends
from pydantic import BaseModel, StringConstraints
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse

from jobs.spec import DEFAULT_BRANCH
from pipeline.hub.contents import resolve_revision
from pipeline.hub.errors import BadRequest, Conflict, RevisionNotFound
from pipeline.hub.events import Event, create_repository, owner_id, record_ref_changes
from pipeline.hub.git import NO_REF, PULL_REQUEST_PREFIX, git, lines_of
from pipeline.hub.http_json import Json, client_warning, hub_url, json_body
from pipeline.hub.repositories import (
    RESERVED_OWNERS,
    SHA,
    Repository,
    RepositoryName,
    RepositoryType,
    is_ref_name,
    read_refs,
    repository_name,
)
from pipeline.hub.service import API, Hub, HubOf, Locked, Readable, Writer, person
from pipeline.hub.webhooks import list_webhooks

_RESERVED_NAMES = frozenset({"discussions", "refs"})
"""In the URLs of the API, these words after a name ask something of the repository."""

router = APIRouter()


class NamedRepository(BaseModel):
    # The client also sends options that this hub does not have, such as visibility and secrets.
    name: str
    organization: str | None = None
    type: RepositoryType = "model"


class NewRepository(NamedRepository):
    empty: bool = False
    """Whether to create the repository without a first commit, so that the first `git push` needs
    no pull. The Hugging Face Hub does not have this option."""


class Move(BaseModel):
    fromRepo: str
    toRepo: str
    type: RepositoryType = "model"


class NewBranch(BaseModel):
    startingPoint: str | None = None


class NewTag(BaseModel):
    tag: str
    # Git allows no NUL character in it.
    message: Annotated[str, StringConstraints(pattern=r"^[^\x00]*$")] | None = None


@router.post("/api/repos/create")
def create(
    request: Request,
    hub: HubOf,
    identity: Writer,
    body: Annotated[NewRepository, json_body(NewRepository)],
) -> Json:
    name = new_name(body.type, body.organization or hub.settings.owner, body.name)
    author = None if body.empty else identity.signature
    repository = create_repository(hub.repositories, hub.log, name, author)
    return {"url": f"{hub_url(request)}/{name.path}", "name": name.id, "id": repository.id}


@router.delete("/api/repos/delete", dependencies=[Depends(person)])
async def remove(hub: HubOf, body: Annotated[NamedRepository, json_body(NamedRepository)]) -> None:
    owner = body.organization or hub.settings.owner
    name = RepositoryName(type=body.type, owner=owner, name=body.name)
    async with hub.locked(name) as repository:
        await run_in_threadpool(_delete, hub, repository)


def _delete(hub: Hub, repository: Repository) -> None:
    with hub.repositories.removal(repository), hub.database.write() as connection:
        hub.log.record(connection, repository, Event(action="delete"))
        hub.repositories.forget(connection, repository)


@router.post("/api/repos/move", dependencies=[Depends(person)])
async def move(
    request: Request, hub: HubOf, body: Annotated[Move, json_body(Move)]
) -> JSONResponse:
    source = hub.name_of(body.type, body.fromRepo)
    new_owner, _, new = body.toRepo.rpartition("/")
    target = new_name(body.type, new_owner or hub.settings.owner, new)
    async with hub.locked(source) as repository:
        told = await run_in_threadpool(_move, hub, repository, target)
    headers = client_warning(f"moved {repository.name.id}", told)
    return JSONResponse({"url": f"{hub_url(request)}/{target.path}"}, headers=headers)


def _move(hub: Hub, repository: Repository, new: RepositoryName) -> list[str]:
    """Moves the repository, and returns what a person has to change then, because webhooks watch
    the old name. Raises Conflict if the new one is taken."""
    old = repository.name
    moved = {"name": new.id, "owner": {"id": owner_id(new.owner)}}
    with hub.database.write() as connection:
        hub.repositories.rename(connection, repository, new)
        hub.log.record(connection, repository, Event(action="move", more={"movedTo": moved}))
        webhooks = list_webhooks(connection)
    ids = [each.id for each in webhooks if any(item.is_for(old) for item in each.watched)]
    if not ids:
        return []
    return [
        f"{', '.join(ids)}: these webhooks watch {old.id}, and get no events of {new.id}; a "
        f'pipeline that follows it needs dataset = "{new.id}" in pipeline.toml, then: pipeline '
        f"down && pipeline up --detach; for another webhook: pipeline webhooks update ID --watch "
        f"{new.type}:{new.id}"
    ]


def new_name(type: RepositoryType, owner: str, name: str) -> RepositoryName:
    """The name of a new repository. Raises BadRequest if no repository may have it."""
    if owner.lower() in RESERVED_OWNERS or name in _RESERVED_NAMES:
        raise BadRequest(
            f"No repository can be called {owner}/{name}: URLs of this hub with this word mean "
            "something else, so nobody could reach the repository. Choose another name."
        )
    return repository_name(type, owner, name)


@router.get(f"{API}/refs")
def list_refs(repository: Readable, include_prs: bool = False) -> Json:
    return {
        "branches": _listed(repository, "refs/heads/"),
        "tags": _listed(repository, "refs/tags/"),
        "converts": [],
        "pullRequests": _listed(repository, PULL_REQUEST_PREFIX) if include_prs else [],
    }


@router.post(f"{API}/branch/{{branch:rest}}")
def create_branch(
    hub: HubOf,
    body: Annotated[NewBranch, json_body(NewBranch)],
    repository: Locked,
    branch: str,
) -> None:
    """The branch begins at `startingPoint`, by default at the newest commit of `main`."""
    ref = _new_ref(repository, "refs/heads/", branch)
    commit = resolve_revision(repository, body.startingPoint or "main")
    git(repository.folder, "update-ref", ref, commit, NO_REF)
    record_ref_changes(repository, hub.log)


@router.delete(f"{API}/branch/{{branch:rest}}")
def delete_branch(hub: HubOf, repository: Locked, branch: str) -> None:
    ref = _full_ref("refs/heads/", branch)
    if ref == DEFAULT_BRANCH:
        raise BadRequest(f"Cannot delete {DEFAULT_BRANCH}: delete the repository instead.")
    _delete_ref(hub, repository, ref)


@router.post(f"{API}/tag/{{revision:rest}}")
def create_tag(
    hub: HubOf,
    identity: Writer,
    body: Annotated[NewTag, json_body(NewTag)],
    repository: Locked,
    revision: str,
) -> None:
    """Creates an annotated tag if there is a `message`."""
    commit = resolve_revision(repository, revision)
    _new_ref(repository, "refs/tags/", body.tag)
    # By default, git would remove lines that begin with `#`, such as titles in Markdown.
    options = ("-a", "--cleanup=verbatim", "-F", "-") if body.message else ()
    git(
        repository.folder,
        *("tag", *options, body.tag, commit),
        stdin=f"{body.message}\n".encode(),
        extra=identity.signature.environment,
    )
    record_ref_changes(repository, hub.log)


@router.delete(f"{API}/tag/{{tag:rest}}")
def delete_tag(hub: HubOf, repository: Locked, tag: str) -> None:
    _delete_ref(hub, repository, _full_ref("refs/tags/", tag))


def _delete_ref(hub: Hub, repository: Repository, ref: str) -> None:
    if ref not in read_refs(repository):
        raise RevisionNotFound(f"The {repository.name} has no {ref}: check the name.")
    git(repository.folder, "update-ref", "-d", ref)
    record_ref_changes(repository, hub.log)


def _listed(repository: Repository, prefix: str) -> list[dict[str, str]]:
    """The refs below `prefix`, with their commits. A tag of a file or a folder is left out, because
    a client would take the file or folder for a commit."""
    output = git(
        repository.folder,
        "for-each-ref",
        "--format=%(refname) %(objectname) %(objecttype) %(*objectname) %(*objecttype)",
        prefix,
    )
    refs = (line.split(" ") for line in lines_of(output))
    return [
        {"name": ref.removeprefix(prefix), "ref": ref, "targetCommit": peeled or sha}
        for ref, sha, type, peeled, peeled_type in refs
        if (peeled_type or type) not in ("blob", "tree")
    ]


def _new_ref(repository: Repository, prefix: str, name: str) -> str:
    if SHA.fullmatch(name):
        raise BadRequest(f"{name!r} has the form of a commit's sha: choose another name.")
    ref = _full_ref(prefix, name)
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


def _full_ref(prefix: str, name: str) -> str:
    if not is_ref_name(name) or name == "HEAD" or name.startswith("refs/"):
        raise BadRequest(
            f"{name!r} is not a valid name for a branch or a tag: use letters, digits, '-', '_', "
            "'.' and '/', and at most 250 bytes between two '/'. The names HEAD and refs/… are not "
            "allowed."
        )
    return f"{prefix}{name}"
