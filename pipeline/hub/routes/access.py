"""Parts of the routes' paths, and what the token of a request may do.

A route gets these dependencies as arguments. FastAPI runs them in their order, and each raises the
error that the client gets. A route gets its repository from `Readable` or `Locked`, or finds it
with `Hub.find_reached`, as both do. A route that belongs to no repository has `everywhere`,
`person` or `hubs_own`; the few without them tell a client nothing that its token does not reach.
"""

from collections.abc import AsyncIterator
from typing import Annotated
from urllib.parse import unquote

from fastapi import Depends
from starlette.convertors import Convertor, register_url_convertor
from starlette.requests import Request

from pipeline.hub.errors import Forbidden
from pipeline.hub.repositories import REPOSITORY_TYPES, Repository, RepositoryName, RepositoryType
from pipeline.hub.service import HubOf
from pipeline.hub.tokens import READING, Identity, check_site

TYPES: dict[str, RepositoryType] = {f"{type}s": type for type in REPOSITORY_TYPES}


class _Part(Convertor[str]):
    """Decodes a part of the encoded path, so an encoded slash (`%2F`) does not end the part."""

    regex = "[^/]+"

    def convert(self, value: str) -> str:
        return unquote(value)


class _Rest(_Part):
    regex = ".*"


class _TypedRepository(_Part):
    regex = f"(?:{'|'.join(TYPES)})/(?:[^/]+/)?[^/]+"


class _Repository(_Part):
    regex = f"(?:(?:{'|'.join(TYPES)})/)?(?:[^/]+/)?[^/]+"


register_url_convertor("part", _Part())
register_url_convertor("rest", _Rest())
register_url_convertor("typed_repository", _TypedRepository())
register_url_convertor("repository", _Repository())

API = "/api/{repository:typed_repository}"
FILES = "/{repository:repository}"


async def identified(request: Request, hub: HubOf) -> Identity:
    """Who makes the request. Raises Unauthorized, and Forbidden for a page of another site."""
    identity = await hub.guard.check(request.scope)
    check_site(request.scope)
    return identity


Who = Annotated[Identity, Depends(identified)]


async def with_token(request: Request, identity: Who) -> Identity:
    identity.require_token(request.url.path)
    return identity


async def everywhere(
    request: Request, identity: Annotated[Identity, Depends(with_token)]
) -> Identity:
    """For routes that belong to no repository: a token that is limited to some may not use them."""
    if identity.is_limited:
        raise Forbidden(
            f"The token {identity.token_name!r} is only for some repositories, and "
            f"{request.url.path} does not belong to one of them: use another token."
        )
    if request.method not in READING:
        identity.require_write(f"{request.method} {request.url.path}")
    return identity


async def person(request: Request, identity: Annotated[Identity, Depends(everywhere)]) -> Identity:
    """For routes that a job may not use: a job may only read and write repositories."""
    identity.require_person(request.url.path)
    return identity


async def hubs_own(request: Request, identity: Annotated[Identity, Depends(with_token)]) -> None:
    if not identity.owns_hub:
        raise Forbidden(
            f"{request.url.path} needs the hub's own token, which `pipeline env` prints."
        )


async def writer(request: Request, identity: Who) -> Identity:
    identity.require_write(f"{request.method} {request.url.path}")
    return identity


Writer = Annotated[Identity, Depends(writer)]


async def named(request: Request, hub: HubOf) -> RepositoryName:
    """The repository that the path names."""
    path: str = request.path_params["repository"].removesuffix(".git")
    first, _, rest = path.partition("/")
    if rest and first in TYPES:
        return hub.name_of(TYPES[first], rest)
    return hub.name_of("model", path)


Named = Annotated[RepositoryName, Depends(named)]


def readable(hub: HubOf, identity: Who, name: Named) -> Repository:
    return hub.find_reached(name, identity)


Readable = Annotated[Repository, Depends(readable)]


async def locked(hub: HubOf, identity: Writer, name: Named) -> AsyncIterator[Repository]:
    """The repository, under its lock until the route has made its change.

    Declare it after the body: while a body comes in, no lock is held, and the repository may be
    deleted or replaced.
    """
    async with hub.locked(name, identity) as repository:
        yield repository


Locked = Annotated[Repository, Depends(locked, scope="function")]
