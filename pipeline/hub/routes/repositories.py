"""API routes that create, delete and move repositories, and change their settings."""

from typing import Annotated, Literal

from fastapi import APIRouter, Depends
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse

from pipeline.hub.actions import repositories as acts
from pipeline.hub.errors import BadRequest, Conflict, NotSupported
from pipeline.hub.http_json import Json, client_warning, hub_url, json_body
from pipeline.hub.repositories import (
    RESERVED_OWNERS,
    RepositoryName,
    RepositoryType,
    repository_name,
)
from pipeline.hub.routes.access import (
    API,
    Locked,
    Readable,
    Who,
    Writer,
    everywhere,
    person,
    writer,
)
from pipeline.hub.service import Hub, HubOf
from pipeline.hub.tokens import Identity, signature
from pipeline.hub.webhooks import list_webhooks

_RESERVED_NAMES = frozenset({"auth-check", "discussions", "refs"})
"""In the URLs of the API, these words after a name ask something of the repository."""

router = APIRouter()
Visibility = Literal["private", "protected", "public"]
"""On the Hugging Face Hub, `protected` hides the files. Here it hides the repository."""


class NamedRepository(BaseModel):
    # The client also sends options that this hub does not have, such as hardware and templates.
    name: str
    organization: str | None = None
    type: RepositoryType = "model"


class NewRepository(NamedRepository):
    visibility: Visibility | None = None
    secrets: tuple[object, ...] = ()
    variables: tuple[object, ...] = ()
    empty: bool = False
    """Whether to create the repository without a first commit, so that the first `git push` needs
    no pull. The Hugging Face Hub does not have this option."""


class Move(BaseModel):
    fromRepo: str
    toRepo: str
    type: RepositoryType = "model"


class RepositorySettings(BaseModel):
    visibility: Visibility | None = None
    gated: str | bool | None = None


@router.post("/api/repos/create")
def create(
    request: Request,
    hub: HubOf,
    identity: Annotated[Identity, Depends(everywhere)],
    body: Annotated[NewRepository, json_body(NewRepository)],
) -> Json:
    name = _new_name(hub, body.type, body.organization, body.name)
    if body.secrets or body.variables:
        raise NotSupported(
            "A new Space with secrets or variables: not supported by this hub. Create the Space, "
            "then add its secrets with `hf spaces secrets add`."
        )
    url = f"{hub_url(request)}/{name.path}"
    try:
        repository = acts.create(
            hub.log,
            hub.repositories,
            name,
            private=body.visibility != "public",
            author=None if body.empty else signature(identity),
        )
    except Conflict as error:
        raise Conflict(str(error), url=url) from None
    return {"url": url, "name": name.id, "id": repository.id}


@router.delete("/api/repos/delete", dependencies=[Depends(person)])
async def remove(
    hub: HubOf, identity: Who, body: Annotated[NamedRepository, json_body(NamedRepository)]
) -> None:
    owner = body.organization or hub.settings.owner
    name = RepositoryName(type=body.type, owner=owner, name=body.name)
    async with hub.locked(name, identity) as repository:
        await run_in_threadpool(acts.delete, hub.log, hub.repositories, repository)


@router.post("/api/repos/move", dependencies=[Depends(person)])
async def move(
    request: Request, hub: HubOf, identity: Who, body: Annotated[Move, json_body(Move)]
) -> JSONResponse:
    source = hub.name_of(body.type, body.fromRepo)
    new_owner, _, new = body.toRepo.rpartition("/")
    target = _new_name(hub, body.type, new_owner, new)
    async with hub.locked(source, identity) as repository:
        await run_in_threadpool(acts.move, hub.log, hub.repositories, repository, target)
        told = await run_in_threadpool(_left_behind, hub, repository.name, target)
    headers = client_warning(f"moved {repository.name.id}", told)
    return JSONResponse({"url": f"{hub_url(request)}/{target.path}"}, headers=headers)


def _left_behind(hub: Hub, old: RepositoryName, new: RepositoryName) -> list[str]:
    """What a person has to change after a move, because webhooks watch the old name."""
    with hub.database.read() as connection:
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


@router.get(f"{API}/auth-check/write", dependencies=[Depends(writer)])
@router.get(f"{API}/auth-check")
def check_access(_: Readable) -> Json:
    return {}


@router.put(f"{API}/settings")
def change_settings(
    hub: HubOf,
    identity: Writer,
    body: Annotated[RepositorySettings, json_body(RepositorySettings)],
    repository: Locked,
) -> Json:
    """Changes the visibility. Raises BadRequest for `gated`, and ignores all other settings."""
    identity.require_person("the settings of a repository")
    if body.gated:
        raise BadRequest(
            "Gated repositories are not supported by this hub: make the repository private, and "
            "create a token for it with `pipeline hub tokens create`."
        )
    private = repository.private if body.visibility is None else body.visibility != "public"
    if private != repository.private:
        acts.set_private(hub.log, hub.repositories, repository, private)
    return {"private": private}


def _new_name(hub: Hub, type: RepositoryType, owner: str | None, name: str) -> RepositoryName:
    """The name of a new repository. Raises BadRequest if no repository may have it."""
    owner = owner or hub.settings.owner
    if owner.lower() in RESERVED_OWNERS or name in _RESERVED_NAMES:
        raise BadRequest(
            f"No repository can be called {owner}/{name}: URLs of this hub with this word mean "
            "something else, so nobody could reach the repository. Choose another name."
        )
    return repository_name(type, owner, name)
