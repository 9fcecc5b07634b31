"""Stores the tokens that were created with the hub's own token. Each may read or also write, in all
repositories or only some.

Only the SHA-256 of a token is stored. A token has 160 random bits, so nobody can find it by trying,
and a slower hash is not needed.
"""

import hashlib
import logging
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, Row, delete, insert, select, update
from sqlalchemy.exc import OperationalError

from pipeline.hub.auth import Identity, Role
from pipeline.hub.database import Database
from pipeline.hub.errors import BadRequest, Conflict, TokenNotFound
from pipeline.hub.schema import tokens as table

logger = logging.getLogger(__name__)

USE_IS_STORED_EVERY_SECONDS = 60.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")


@dataclass(frozen=True, kw_only=True)
class StoredToken:
    name: str
    role: Role
    repositories: tuple[str, ...] | None
    """The ids of the only repositories that it reaches. None if it reaches all."""
    created_at: float
    last_used_at: float | None
    """The time of its last use. It may be a minute old, because it is stored at most once a minute.
    None if the token was never used."""


def check_name(name: str) -> None:
    """Raises BadRequest if a token cannot have this name."""
    if not _NAME.fullmatch(name):
        raise BadRequest(
            f"{name!r} is not a valid name for a token: use 1 to 96 letters, digits, '-', '_' and "
            "'.', beginning with a letter or a digit."
        )


def create_token(
    connection: Connection, name: str, role: Role, repositories: Sequence[str] | None
) -> str:
    """Creates a token and returns it; it cannot be read again. `repositories` are ids, or None for
    all. Raises BadRequest for an invalid name, and Conflict if the name is in use."""
    check_name(name)
    if connection.execute(select(table.c.id).where(table.c.name == name)).first() is not None:
        raise Conflict(
            f"There is a token {name!r} already: revoke it first, or choose another name."
        )
    token = f"hf_{secrets.token_hex(20)}"
    connection.execute(
        insert(table).values(
            id=secrets.token_hex(12),
            name=name,
            digest=_digest(token.encode()),
            role=role,
            repositories=None if repositories is None else list(repositories),
            created_at=time.time(),
        )
    )
    return token


def list_tokens(connection: Connection) -> list[StoredToken]:
    return [_record(row) for row in connection.execute(select(table).order_by(table.c.created_at))]


def revoke_token(connection: Connection, name: str) -> None:
    """Deletes a token, so that the next request with it is refused. Raises TokenNotFound."""
    if connection.execute(delete(table).where(table.c.name == name)).rowcount == 0:
        raise TokenNotFound(
            f"There is no token {name!r} here: list the tokens with `pipeline hub tokens ls`."
        )


def identity_of_token(database: Database, token: bytes, user: str) -> Identity | None:
    """The identity that the token gives to a request. None if the hub has no such token. `user` is
    the user for whom all tokens act."""
    digest = _digest(token)
    with database.read() as connection:
        row = connection.execute(select(table).where(table.c.digest == digest)).one_or_none()
    if row is None or not secrets.compare_digest(row.digest, digest):
        return None
    now = time.time()
    if row.last_used_at is None or now - row.last_used_at >= USE_IS_STORED_EVERY_SECONDS:
        used = update(table).where(table.c.id == row.id).values(last_used_at=now)
        try:
            with database.write_relaxed() as connection:
                connection.execute(used)
        except OperationalError as error:
            # A request that only reads must work even if the disk is full or read-only.
            logger.warning(
                "the hub cannot store that the token %r was used: %s", row.name, error.orig
            )
    stored = _record(row)
    return Identity(
        user=user,
        role=stored.role,
        token_name=stored.name,
        repositories=None if stored.repositories is None else frozenset(stored.repositories),
    )


def _digest(token: bytes) -> str:
    return hashlib.sha256(token).hexdigest()


def _record(row: Row[tuple[object, ...]]) -> StoredToken:
    return StoredToken(
        name=row.name,
        role=row.role,
        repositories=None if row.repositories is None else tuple(row.repositories),
        created_at=row.created_at,
        last_used_at=row.last_used_at,
    )
