"""API routes for the secrets of a Space, which its app gets as environment variables. They are
stored encrypted, and no route shows their values."""

import time
from typing import Annotated

from fastapi import APIRouter
from pydantic import BaseModel, StringConstraints
from sqlalchemy import select
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.engine import Connection

from pipeline.hub.database import space_secrets as table
from pipeline.hub.errors import BadRequest
from pipeline.hub.events import Event
from pipeline.hub.http_json import Json, iso_time, json_body
from pipeline.hub.repositories import Repository
from pipeline.hub.routes.access import API, Locked, Readable, Writer
from pipeline.hub.service import HubOf
from pipeline.hub.tokens import Identity

router = APIRouter(prefix=f"{API}/secrets")


class NewSecret(BaseModel):
    key: Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,254}$")]
    value: Annotated[
        str, StringConstraints(min_length=1, max_length=64 * 1024, pattern=r"^[^\x00]*$")
    ]
    description: Annotated[str, StringConstraints(max_length=4096)] | None = None


@router.get("")
def show(hub: HubOf, identity: Writer, space: Readable) -> Json:
    """Answers only a writer: a reader may not see even the names of secrets."""
    _check(identity, space)
    with hub.database.read() as connection:
        return _listed(connection, space)


@router.post("")
def put(
    hub: HubOf,
    identity: Writer,
    secret: Annotated[NewSecret, json_body(NewSecret)],
    space: Locked,
) -> Json:
    """Adds or replaces a secret. Like the Hugging Face Hub, stores an event of the scope
    `repo.config`."""
    _check(identity, space)
    values = {
        "encrypted_value": hub.cipher.encrypt(secret.value),
        "description": secret.description,
        "updated_at": time.time(),
    }
    with hub.database.write() as connection:
        connection.execute(
            insert(table)
            .values(repository_id=space.id, key=secret.key, **values)
            .on_conflict_do_update(index_elements=["repository_id", "key"], set_=values)
        )
        hub.log.record(connection, space, Event(action="update", scope="repo.config"))
        return _listed(connection, space)


def _check(identity: Identity, space: Repository) -> None:
    identity.require_person("secrets of a Space")
    if space.name.type != "space":
        raise BadRequest(f"A {space.name.type} has no secrets: only a Space has any.")


def _listed(connection: Connection, space: Repository) -> Json:
    rows = connection.execute(
        select(table).where(table.c.repository_id == space.id).order_by(table.c.key)
    )
    return {
        row.key: {
            "key": row.key,
            "description": row.description,
            "updatedAt": iso_time(row.updated_at),
        }
        for row in rows
    }
