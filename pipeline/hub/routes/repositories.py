"""API routes that create, delete and move repositories, and change their settings."""

from collections.abc import Callable
from functools import partial
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy.engine import Connection
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from pipeline.hub.actions import repositories as acts
from pipeline.hub.errors import BadRequest, Conflict
from pipeline.hub.http_json import client_warning, hub_url, read_json
from pipeline.hub.repositories.names import (
    RESERVED_OWNERS,
    RepositoryName,
    RepositoryType,
    repository_name,
    requested_name,
)
from pipeline.hub.repositories.store import Repository
from pipeline.hub.routes.spaces import SETTINGS, NewSetting, put_settings
from pipeline.hub.service import Hub, hub_of
from pipeline.hub.tokens.auth import identity_of, require_a_person, signature
from pipeline.hub.webhooks.store import list_webhooks

Answer = TypeVar("Answer")

_MAX_SETTINGS = 100
"""How many secrets, and how many variables, a new Space may have: all of them are stored while
other changes wait."""


class _Body(BaseModel):
    # The client also sends options that this hub does not have, such as hardware and templates.
    model_config = ConfigDict(frozen=True, extra="ignore")


class NamedRepository(_Body):
    name: str
    organization: str | None = None
    type: RepositoryType = "model"
    visibility: Literal["private", "protected", "public"] | None = None
    private: bool | None = None


class NewRepository(NamedRepository):
    secrets: tuple[NewSetting, ...] = Field((), max_length=_MAX_SETTINGS)
    variables: tuple[NewSetting, ...] = Field((), max_length=_MAX_SETTINGS)
    """Only a Space has secrets and variables."""
    empty: bool = False
    """Whether to create the repository without a first commit, so that the first `git push` needs
    no pull. The Hugging Face Hub does not have this option."""


class Move(_Body):
    fromRepo: str
    toRepo: str
    type: RepositoryType = "model"


class RepositorySettings(_Body):
    visibility: Literal["private", "protected", "public"] | None = None
    private: bool | None = None
    gated: str | bool | None = None


def routes() -> list[Route]:
    return [
        Route("/api/repos/create", create, methods=["POST"]),
        Route("/api/repos/delete", remove, methods=["DELETE"]),
        Route("/api/repos/move", move, methods=["POST"]),
    ]


async def create(request: Request) -> Response:
    hub, identity = hub_of(request), identity_of(request)
    body = await read_json(request, NewRepository)
    name = _new_name(hub, body.type, body.organization, body.name)
    if body.secrets or body.variables:
        if body.type != "space":
            raise BadRequest(f"A {body.type} has no secrets and no variables: leave them out.")
        require_a_person(identity, SETTINGS)

    def prepare(connection: Connection, repository: Repository) -> None:
        put_settings(connection, repository, "secret", hub.cipher, body.secrets)
        put_settings(connection, repository, "variable", hub.cipher, body.variables)

    act = partial(
        acts.create,
        hub.log,
        hub.repositories,
        name,
        private=_is_private(body, default=True),
        author=None if body.empty else signature(identity),
        prepare=prepare,
    )
    try:
        repository = await _changing(hub, act)
    except Conflict as error:
        there = await run_in_threadpool(hub.find, name)
        raise Conflict(str(error), url=f"{hub_url(request)}/{there.name.path}") from None
    url = f"{hub_url(request)}/{name.path}"
    return JSONResponse({"url": url, "name": name.id, "id": repository.id})


async def remove(request: Request) -> Response:
    hub = hub_of(request)
    body = await read_json(request, NamedRepository)
    name = requested_name(body.type, body.organization or hub.settings.owner, body.name)
    async with hub.locked(name, identity_of(request)) as repository:
        await _changing(hub, partial(acts.delete, hub.log, hub.repositories, repository))
    return Response(status_code=200)


async def move(request: Request) -> Response:
    hub = hub_of(request)
    body = await read_json(request, Move)
    owner, name = _halves(body.fromRepo)
    source = requested_name(body.type, owner or hub.settings.owner, name)
    target = _new_name(hub, body.type, *_halves(body.toRepo))
    async with hub.locked(source, identity_of(request)) as repository:
        await _changing(hub, partial(acts.move, hub.log, hub.repositories, repository, target))
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


async def change_settings(request: Request, hub: Hub, name: RepositoryName) -> Response:
    """Changes the visibility. Raises BadRequest for `gated`, and ignores all other settings."""
    body = await read_json(request, RepositorySettings)
    require_a_person(identity_of(request), "the settings of a repository")
    if body.gated:
        raise BadRequest(
            "Gated repositories are not supported by this hub: make the repository private, and "
            "create a token for it with `pipeline hub tokens create`."
        )

    async with hub.locked(name, identity_of(request)) as repository:
        private = _is_private(body, default=repository.private)
        if private != repository.private:
            act = partial(acts.set_private, hub.log, hub.repositories, repository, private)
            await _changing(hub, act)
    return JSONResponse({"private": private})


async def _changing(hub: Hub, act: Callable[[], Answer]) -> Answer:
    """Runs `act`, which stores an event. Then wakes the deliverer, which sends the event to the
    webhooks."""
    answer = await run_in_threadpool(act)
    hub.log.wake()
    return answer


def _is_private(body: NamedRepository | RepositorySettings, *, default: bool) -> bool:
    if body.visibility is not None:
        # On the Hugging Face Hub, `protected` hides the files. Here it hides the repository.
        return body.visibility != "public"
    return default if body.private is None else body.private


def _halves(id: str) -> tuple[str | None, str]:
    owner, slash, name = id.partition("/")
    return (owner, name) if slash else (None, owner)


def _new_name(hub: Hub, type: RepositoryType, owner: str | None, name: str) -> RepositoryName:
    """The name of a new repository. If the settings have the same owner in another letter case
    (`local` for `Local`), the name gets the spelling of the settings.

    Raises BadRequest for an invalid name, and for an owner that no repository may have.
    """
    known = {each.lower(): each for each in (*hub.settings.orgs, hub.settings.owner)}
    wanted = owner or hub.settings.owner
    if wanted.lower() in RESERVED_OWNERS:
        raise BadRequest(
            f"{wanted!r} cannot own a repository: other URLs of this hub begin with this word, so "
            "nobody could reach the repository. Choose another owner."
        )
    return repository_name(type, known.get(wanted.lower(), wanted), name)
