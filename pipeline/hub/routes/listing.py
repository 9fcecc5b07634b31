"""API routes that list repositories."""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Depends, Query
from sqlalchemy import select
from starlette.requests import Request
from starlette.responses import JSONResponse

from pipeline.hub.database import refs
from pipeline.hub.errors import NotSupported
from pipeline.hub.http_json import Json
from pipeline.hub.repositories import DEFAULT_BRANCH, Repository
from pipeline.hub.routes.access import TYPES, Who, with_token
from pipeline.hub.routes.contents import described, siblings_at
from pipeline.hub.service import Hub, HubOf
from pipeline.hub.tokens import Identity

_QUERY = frozenset(
    {"author", "search", "pipeline_tag", "limit", "full", "cardData", "config", "expand"}
)

router = APIRouter()


def list_repositories(
    request: Request,
    hub: HubOf,
    identity: Who,
    author: str = "",
    search: Annotated[Sequence[str], Query()] = (),
    pipeline_tag: str = "",
    limit: Annotated[int | None, Query(ge=1)] = None,
    full: bool = False,
) -> JSONResponse:
    """The repositories of one type, the newest first. Raises NotSupported for a filter or an order
    that this hub does not have, because without it the list would be wrong."""
    if unknown := sorted(request.query_params.keys() - _QUERY):
        raise NotSupported(
            f"Lists by {', '.join(unknown)}: not supported by this hub. It lists by author, "
            "search, pipeline_tag and limit, the newest first."
        )
    type = TYPES[request.url.path.removeprefix("/api/")]
    found = sorted(
        (
            (repository, sha)
            for repository, sha in _seen(hub, identity)
            if repository.name.type == type
            and author.lower() in ("", repository.name.owner.lower())
            and all(text.lower() in repository.name.id.lower() for text in search)
            and pipeline_tag in ("", described(repository, sha).get("pipeline_tag"))
        ),
        key=lambda each: each[0].created_at,
        reverse=True,
    )[:limit]
    # Copies, because `described` keeps its answers, and they have no files.
    items = [{**described(repository, sha)} for repository, sha in found]
    if full:
        for item, (repository, sha) in zip(items, found, strict=True):
            item["siblings"] = siblings_at(repository, sha) if sha else []
    return JSONResponse(items)


for _plural in TYPES:
    router.get(f"/api/{_plural}")(list_repositories)


@router.get("/api/settings/repositories")
def own_repositories(hub: HubOf, identity: Annotated[Identity, Depends(with_token)]) -> list[Json]:
    """The repositories of the token's user, each with its size on disk in bytes."""
    return [
        {
            "id": repository.name.id,
            "type": repository.name.type,
            "updatedAt": described(repository, sha)["lastModified"],
            "visibility": "private" if repository.private else "public",
            "storage": _bytes_on_disk(repository.folder),
        }
        for repository, sha in _seen(hub, identity)
        if repository.name.owner.lower() == identity.user.lower()
    ]


def _seen(hub: Hub, identity: Identity) -> Iterator[tuple[Repository, str | None]]:
    """The repositories that the token reaches, each with the head of `main`."""
    with hub.database.read() as connection:
        found = select(refs.c.repository_id, refs.c.sha).where(refs.c.ref == DEFAULT_BRANCH)
        heads: Mapping[str, str] = {row.repository_id: row.sha for row in connection.execute(found)}
        present = hub.repositories.all(connection)
    return ((each, heads.get(each.id)) for each in present if identity.may_see(each))


def _bytes_on_disk(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_size
            except FileNotFoundError:
                continue  # git has just renamed or removed this file
    return total
