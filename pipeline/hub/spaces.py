"""Stores the settings of a Space: its secrets and its variables, which together are the environment
variables of its app. Secrets are encrypted, and no route shows their values."""

import time
from dataclasses import dataclass, field
from typing import Literal

from sqlalchemy import delete, select
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.engine import Connection

from pipeline.hub.errors import BadRequest, SpaceSettingNotFound
from pipeline.hub.repositories.store import Repository
from pipeline.hub.schema import space_settings as table
from pipeline.hub.webhooks.store import SecretCipher

Kind = Literal["secret", "variable"]


@dataclass(frozen=True, kw_only=True)
class SpaceSetting:
    key: str
    kind: Kind
    value: str | None = field(repr=False)
    """None for a secret."""
    description: str | None
    updated_at: float


def list_settings(
    connection: Connection, space: Repository, kind: Kind
) -> tuple[SpaceSetting, ...]:
    rows = connection.execute(
        select(table).where(table.c.repository_id == space.id).order_by(table.c.key)
    )
    found = (
        SpaceSetting(
            key=row.key,
            kind="variable" if row.encrypted_value is None else "secret",
            value=row.value,
            description=row.description,
            updated_at=row.updated_at,
        )
        for row in rows
    )
    return tuple(setting for setting in found if setting.kind == kind)


def put_setting(
    connection: Connection,
    space: Repository,
    kind: Kind,
    cipher: SecretCipher,
    *,
    key: str,
    value: str,
    description: str | None,
) -> None:
    """Adds or replaces a setting. Raises BadRequest if the Space has a setting of the other kind
    with this key, because an environment has only one value for each name."""
    other: Kind = "variable" if kind == "secret" else "secret"
    if any(each.key == key for each in list_settings(connection, space, other)):
        raise BadRequest(f"The {space.name} has a {other} {key} already: delete it first.")
    values = {
        "value": value if kind == "variable" else None,
        "encrypted_value": cipher.seal(value) if kind == "secret" else None,
        "description": description,
        "updated_at": time.time(),
    }
    connection.execute(
        insert(table)
        .values(repository_id=space.id, key=key, **values)
        .on_conflict_do_update(index_elements=["repository_id", "key"], set_=values)
    )


def delete_setting(connection: Connection, space: Repository, kind: Kind, key: str) -> None:
    """Raises SpaceSettingNotFound."""
    if all(each.key != key for each in list_settings(connection, space, kind)):
        raise SpaceSettingNotFound(
            f"The {space.name} has no {kind} {key}: list its {kind}s to find the right name."
        )
    connection.execute(delete(table).where(table.c.repository_id == space.id, table.c.key == key))
