"""Creates, lists and revokes the tokens of a hub. The routes use this module, and the command line
while no hub runs. A token that a person created may only read, or read and write, and is valid for
all repositories or only for some.
"""

import hashlib
import re
import secrets
import time
from collections.abc import Sequence
from typing import Literal, get_args

from sqlalchemy import delete, insert, select

from pipeline.hub.database import Database
from pipeline.hub.database import tokens as table
from pipeline.hub.errors import BadRequest, Conflict, NotFound
from pipeline.hub.http_json import Json, iso_time
from pipeline.hub.repositories import Repositories, RepositoryName, repository_name

Role = Literal["read", "write"]


def digest(token: bytes) -> str:
    """What the hub stores of a token. A slower hash is not needed, because a token has 160 random
    bits, and nobody can find it by trying."""
    return hashlib.sha256(token).hexdigest()


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")


def check_name(name: str) -> None:
    """Raises BadRequest if a token cannot have this name."""
    if not _NAME.fullmatch(name):
        raise BadRequest(
            f"{name!r} is not a valid name for a token: use 1 to 96 letters, digits, '-', '_' and "
            "'.', beginning with a letter or a digit."
        )


def create_token(
    database: Database,
    repositories: Repositories,
    name: str,
    role: str,
    reaches: Sequence[str],
) -> Json:
    """Creates a token. `reaches` are the only repositories for which it is valid, such as
    `dataset:local/facts`; if it is empty, the token is for all repositories. Only this answer
    shows the token."""
    if role not in get_args(Role):
        raise BadRequest(f"{role!r} is not a role: choose read or write.")
    check_name(name)
    token = f"hf_{secrets.token_hex(20)}"
    with database.write() as connection:
        ids = [repositories.find(connection, _named(item)).id for item in reaches]
        if connection.execute(select(table.c.name).where(table.c.name == name)).first() is not None:
            raise Conflict(
                f"There is a token {name!r} already: revoke it first, or choose another name."
            )
        connection.execute(
            insert(table).values(
                name=name,
                digest=digest(token.encode()),
                role=role,
                repositories=ids or None,
                created_at=time.time(),
            )
        )
    return {"name": name, "role": role, "token": token}


def _named(item: str) -> RepositoryName:
    type, _, id = item.partition(":")
    owner, slash, short = id.partition("/")
    if not slash:
        raise BadRequest(
            f"{item!r} does not name a repository: write its type, owner and name, such as "
            "dataset:owner/name."
        )
    return repository_name(type, owner, short)


def list_tokens(database: Database, repositories: Repositories) -> list[Json]:
    with database.read() as connection:
        names = {
            each.id: f"{each.name.type}:{each.name.id}" for each in repositories.all(connection)
        }
        return [
            {
                "name": row.name,
                "role": row.role,
                "repositories": row.repositories
                and [names.get(id, "(deleted)") for id in row.repositories],
                "createdAt": iso_time(row.created_at),
            }
            for row in connection.execute(select(table).order_by(table.c.created_at))
        ]


def revoke_token(database: Database, name: str) -> Json:
    """Deletes a token, so that the next request with it is refused. Raises NotFound."""
    with database.write() as connection:
        if connection.execute(delete(table).where(table.c.name == name)).rowcount == 0:
            raise NotFound(
                f"There is no token {name!r} here: list the tokens with `pipeline hub tokens ls`."
            )
    return {"revoked": name}
