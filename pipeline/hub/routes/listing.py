"""API routes that list repositories, in pages."""

import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from sqlalchemy import Connection, select
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from pipeline.hub.contents.cards import README, Card, read_card
from pipeline.hub.contents.history import list_commits
from pipeline.hub.contents.trees import find_paths, list_tree
from pipeline.hub.errors import NotSupported
from pipeline.hub.http_json import iso_time, next_page, query_flag, query_int
from pipeline.hub.repositories.names import DEFAULT_BRANCH, RepositoryType
from pipeline.hub.repositories.store import Repository
from pipeline.hub.routes.contents import Json, facts, facts_of_card
from pipeline.hub.schema import refs
from pipeline.hub.service import Hub, hub_of
from pipeline.hub.tokens.auth import identity_of

PER_PAGE = 1000
_QUERY = frozenset(
    {"author", "search", "pipeline_tag", "limit", "cursor", "full", "cardData", "config", "expand"}
)

Heads = Mapping[str, str]
"""Maps the id of each repository that has a main branch to the head of this branch."""


def routes() -> list[Route]:
    return [
        Route("/api/settings/repositories", own_repositories),
        Route("/api/organizations/{owner}/settings/repositories", repositories_of),
    ]


async def list_repositories(request: Request, hub: Hub, type: RepositoryType) -> Response:
    """The repositories of one type, the newest first. Raises NotSupported for a filter or an order
    that this hub does not have, because without it the list would be wrong.

    The header `Link` has the URL of the next page. The query may have `author`, `pipeline_tag`,
    `limit` and `full`, and `search` several times."""
    query = request.query_params
    if unknown := sorted(query.keys() - _QUERY):
        raise NotSupported(
            f"Lists by {', '.join(unknown)}: not supported by this hub. It lists by author, "
            "search, pipeline_tag and limit, the newest first."
        )
    author = query.get("author", "").lower()
    searched = [text.lower() for text in query.getlist("search")]
    task = query.get("pipeline_tag")
    limit = max(1, query_int(request, "limit", PER_PAGE, at_most=PER_PAGE))
    cursor = query.get("cursor")
    with_files = query_flag(request, "full")
    identity = identity_of(request)

    def read() -> Response:
        with hub.database.read() as connection:
            heads = _heads(connection)
            present = hub.repositories.all(connection)
        chosen = sorted(
            (
                repository
                for repository in present
                if repository.name.type == type
                and identity.may_see(repository)
                and author in ("", repository.name.owner.lower())
                and all(text in repository.name.id.lower() for text in searched)
                and (not task or task in _card(repository, heads).texts("pipeline_tag"))
                and (cursor is None or _key(repository) < cursor)
            ),
            key=_key,
            reverse=True,
        )
        items = [_described(one, heads, with_files=with_files) for one in chosen[:limit]]
        has_more = len(chosen) > limit
        headers = next_page(request, {"cursor": _key(chosen[limit - 1])}) if has_more else None
        return JSONResponse(items, headers=headers)

    return await run_in_threadpool(read)


def _key(repository: Repository) -> str:
    """A text by which lists are sorted. The key of the last item on a page is the cursor of the
    next page."""
    return f"{repository.created_at:020.6f}-{repository.id}"


async def own_repositories(request: Request) -> Response:
    """The repositories of the token's user, each with its size on disk in bytes."""
    return await _owned(request, identity_of(request).user)


async def repositories_of(request: Request) -> Response:
    return await _owned(request, request.path_params["owner"])


async def _owned(request: Request, owner: str) -> Response:
    hub, identity = hub_of(request), identity_of(request)

    def read() -> list[Json]:
        with hub.database.read() as connection:
            heads = _heads(connection)
            present = hub.repositories.all(connection)
        mine = [
            (repository, _bytes_on_disk(repository.folder))
            for repository in present
            if repository.name.owner.lower() == owner.lower() and identity.may_see(repository)
        ]
        total = sum(num_bytes for _, num_bytes in mine)
        return [
            {
                "id": repository.name.id,
                "type": repository.name.type,
                "updatedAt": iso_time(_modified(repository, heads)),
                "visibility": "private" if repository.private else "public",
                "storage": num_bytes,
                "storagePercent": round(100 * num_bytes / total, 2) if total else 0,
            }
            for repository, num_bytes in mine
        ]

    return JSONResponse(await run_in_threadpool(read))


def _described(repository: Repository, heads: Heads, *, with_files: bool) -> Json:
    sha = heads.get(repository.id)
    card = _card(repository, heads)
    described = {
        **facts(repository),
        **facts_of_card(repository, card),
        "cardData": card.metadata,
        "sha": sha,
        "lastModified": iso_time(_modified(repository, heads)),
    }
    if with_files:
        entries = list_tree(repository, sha, recursive=True) if sha else []
        files = [entry.path for entry in entries if entry.type == "file"]
        described["siblings"] = [{"rfilename": path} for path in files]
    return described


def _heads(connection: Connection) -> Heads:
    found = select(refs.c.repository_id, refs.c.sha).where(refs.c.ref == DEFAULT_BRANCH)
    return {row.repository_id: row.sha for row in connection.execute(found)}


def _modified(repository: Repository, heads: Heads) -> float:
    sha = heads.get(repository.id)
    return repository.created_at if sha is None else _committed_at(repository, sha)


@lru_cache(maxsize=10_000)
def _committed_at(repository: Repository, sha: str) -> float:
    return list_commits(repository, sha, skip=0, limit=1)[0].committed_at


def _card(repository: Repository, heads: Heads) -> Card:
    sha = heads.get(repository.id)
    return Card() if sha is None else _card_at(repository, sha)


@lru_cache(maxsize=10_000)
def _card_at(repository: Repository, sha: str) -> Card:
    readme = next(iter(find_paths(repository, sha, [README])), None)
    if readme is None or readme.type != "file":
        return Card()
    return read_card(repository.folder, readme.oid)


def forget_cards() -> None:
    """Empties the caches of cards. Called after a purge, because a card in them may be of a removed
    commit."""
    _card_at.cache_clear()
    read_card.cache_clear()


def _bytes_on_disk(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_size
            except FileNotFoundError:
                continue  # git has just renamed or removed this file
    return total
