"""Creates, lists and revokes tokens, with the names of repositories instead of their ids. The
routes use it, and so does the command line while no hub runs."""

from collections.abc import Sequence
from typing import get_args

from pipeline.hub import token_store
from pipeline.hub.auth import Role
from pipeline.hub.database import Database
from pipeline.hub.errors import BadRequest, RepositoryNotFound
from pipeline.hub.http_json import iso_time
from pipeline.hub.names import repository_name
from pipeline.hub.repositories import Repositories

Json = dict[str, object]


def create(
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
    with database.write() as connection:
        ids = []
        for item in reaches:
            type, _, id = item.partition(":")
            owner, slash, short = id.partition("/")
            if not slash:
                raise BadRequest(
                    f"{item!r} does not name a repository: write its type, owner and name, such as "
                    "dataset:owner/name."
                )
            wanted = repository_name(type, owner, short)
            ids.append(repositories.find(connection, wanted).id)
        token = token_store.create_token(
            connection,
            name,
            role,  # type: ignore[arg-type]
            ids or None,
        )
    return {"name": name, "role": role, "token": token}


def listed(database: Database, repositories: Repositories) -> list[Json]:
    with database.read() as connection:
        items: list[Json] = []
        for token in token_store.list_tokens(connection):
            names = None
            if token.repositories is not None:
                names = []
                for id in token.repositories:
                    try:
                        name = repositories.find_by_id(connection, id).name
                        names.append(f"{name.type}:{name.id}")
                    except RepositoryNotFound:
                        names.append("(deleted)")
            items.append(
                {
                    "name": token.name,
                    "role": token.role,
                    "repositories": names,
                    "createdAt": iso_time(token.created_at),
                    "lastUsedAt": token.last_used_at and iso_time(token.last_used_at),
                }
            )
        return items


def revoke(database: Database, name: str) -> Json:
    with database.write() as connection:
        token_store.revoke_token(connection, name)
    return {"revoked": name}
