"""API routes for the secrets and the variables of a Space."""

from collections.abc import Callable, Iterable, Sequence
from typing import Annotated

from pydantic import BaseModel, ConfigDict, StringConstraints
from sqlalchemy.engine import Connection
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from pipeline.hub.actions.spaces import change_settings
from pipeline.hub.http_json import iso_time, read_json
from pipeline.hub.repositories.names import RepositoryName
from pipeline.hub.repositories.store import Repository
from pipeline.hub.service import Hub
from pipeline.hub.spaces import Kind, delete_setting, list_settings, put_setting
from pipeline.hub.tokens.auth import identity_of, require_a_person
from pipeline.hub.webhooks.store import SecretCipher

MAX_VALUE_CHARACTERS = 64 * 1024
SETTINGS = "secrets and variables of a Space"
"""What `require_a_person` calls them in its error."""

Key = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,254}$")]
Value = Annotated[
    str, StringConstraints(min_length=1, max_length=MAX_VALUE_CHARACTERS, pattern=r"^[^\x00]*$")
]


class NewSetting(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    key: Key
    value: Value
    description: Annotated[str, StringConstraints(max_length=4096)] | None = None


class OldSetting(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    key: Key


async def show(request: Request, hub: Hub, name: RepositoryName, rest: Sequence[str]) -> Response:
    kind = _kind(request, name, rest)
    if kind == "secret":  # a reader may not see even the names of secrets
        _check_writer(request)
    return JSONResponse(await run_in_threadpool(lambda: _listed(hub, hub.find(name), kind)))


async def put(request: Request, hub: Hub, name: RepositoryName, rest: Sequence[str]) -> Response:
    kind = _kind(request, name, rest)
    _check_writer(request)
    body = await read_json(request, NewSetting)

    def change(connection: Connection, space: Repository) -> None:
        put_settings(connection, space, kind, hub.cipher, [body])

    return await _changed(request, hub, name, kind, change)


async def remove(request: Request, hub: Hub, name: RepositoryName, rest: Sequence[str]) -> Response:
    kind = _kind(request, name, rest)
    _check_writer(request)
    key = (await read_json(request, OldSetting)).key

    def change(connection: Connection, space: Repository) -> None:
        delete_setting(connection, space, kind, key)

    return await _changed(request, hub, name, kind, change)


def put_settings(
    connection: Connection,
    space: Repository,
    kind: Kind,
    cipher: SecretCipher,
    settings: Iterable[NewSetting],
) -> None:
    for each in settings:
        put_setting(connection, space, kind, cipher, **each.model_dump())


async def _changed(
    request: Request,
    hub: Hub,
    name: RepositoryName,
    kind: Kind,
    change: Callable[[Connection, Repository], None],
) -> Response:
    """Answers with all secrets, or all variables, after the change; `kind` says which."""
    space = await run_in_threadpool(
        change_settings, hub.log, hub.repositories, name, identity_of(request), change
    )
    hub.log.wake()
    return JSONResponse(await run_in_threadpool(_listed, hub, space, kind))


def _kind(request: Request, name: RepositoryName, rest: Sequence[str]) -> Kind:
    if name.type != "space" or rest:
        raise HTTPException(404)
    return "secret" if request.url.path.rstrip("/").endswith("/secrets") else "variable"


def _check_writer(request: Request) -> None:
    identity = identity_of(request)
    require_a_person(identity, SETTINGS)
    identity.require_write(f"{request.method} {request.url.path}")


def _listed(hub: Hub, space: Repository, kind: Kind) -> dict[str, object]:
    with hub.database.read() as connection:
        settings = list_settings(connection, space, kind)
    return {
        each.key: {
            "key": each.key,
            **({} if each.value is None else {"value": each.value}),
            "description": each.description,
            "updatedAt": iso_time(each.updated_at),
        }
        for each in settings
    }
