"""Tokens that the hub's owner gives away: for reading or writing, for all repositories or some.

Of a token only its SHA-256 is stored. It has 160 random bits, so no slower hash is needed.
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
    """The ids of the only repositories that it reaches; None for all."""
    created_at: float
    last_used_at: float | None
    """To the minute."""


def check_name(name: str) -> None:
    """Raises BadRequest."""
    if not _NAME.fullmatch(name):
        raise BadRequest(
            f"{name!r} is no name for a token: use 1 to 96 letters, digits, '-', '_' and '.'."
        )


def create_token(
    connection: Connection, name: str, role: Role, repositories: Sequence[str] | None
) -> str:
    """The token, which cannot be read again. Raises BadRequest, and Conflict for a name in use."""
    check_name(name)
    if connection.execute(select(table.c.id).where(table.c.name == name)).first() is not None:
        raise Conflict(f"There is a token {name!r} already: revoke it first, or choose a name.")
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
    """The next request with the token is refused. Raises TokenNotFound."""
    if connection.execute(delete(table).where(table.c.name == name)).rowcount == 0:
        raise TokenNotFound(f"No token {name!r} here; list them with `pipeline hub tokens ls`.")


def identity_of_token(database: Database, token: bytes, user: str) -> Identity | None:
    """Who shows the token; None if it is no token of this hub."""
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
            # A full or read-only disk keeps nobody from reading.
            logger.warning("the use of the token %r is not stored: %s", row.name, error.orig)
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
