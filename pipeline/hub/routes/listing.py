"""API routes that list repositories, sorted, filtered and in pages."""

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
from pipeline.hub.errors import BadRequest, NotSupported
from pipeline.hub.http_json import iso_time, next_page, query_flag, query_int
from pipeline.hub.repositories.names import DEFAULT_BRANCH, RepositoryType
from pipeline.hub.repositories.store import Repository
from pipeline.hub.routes.contents import Json, facts, facts_of_card
from pipeline.hub.schema import refs
from pipeline.hub.service import Hub, hub_of
from pipeline.hub.tokens.auth import identity_of

PER_PAGE = 1000
# This hub counts no downloads and no likes. So every order except `lastModified` is by creation.
_SORTS = ("createdAt", "lastModified", "downloads", "likes", "likes30d", "trendingScore")
_UNKNOWN_FILTERS = (
    *("apps", "inference", "inference_provider", "num_parameters"),  # of models
    *("datasets", "linked", "models"),  # of Spaces
)
"""Filters of the Hugging Face Hub that this hub does not have."""

Heads = Mapping[str, str]
"""Maps the id of each repository that has a main branch to the head of this branch."""


def routes() -> list[Route]:
    return [
        Route("/api/settings/repositories", own_repositories),
        Route("/api/organizations/{owner}/settings/repositories", repositories_of),
    ]


async def list_repositories(request: Request, hub: Hub, type: RepositoryType) -> Response:
    """The repositories of one type, by default the newest first. Raises NotSupported for a filter
    that this hub does not have, because without it the list would be wrong.

    The header `Link` has the URL of the next page. The query may have `author`, `gated`,
    `pipeline_tag`, `sort`, `direction`, `limit`, `full` and `cardData`. It may have `search`,
    `filter` and `expand` several times."""
    query = request.query_params
    if unknown := [name for name in _UNKNOWN_FILTERS if name in query]:
        raise NotSupported(f"Filters by {' and '.join(unknown)}: not supported by this hub.")
    author = query.get("author", "").lower()
    searched = [text.lower() for text in query.getlist("search")]
    tags = {tag.lower() for tag in query.getlist("filter")}
    task = query.get("pipeline_tag")
    limit = max(1, query_int(request, "limit", PER_PAGE, at_most=PER_PAGE))
    sort = query.get("sort", "createdAt")
    if sort not in _SORTS:
        raise BadRequest(f"sort={sort!r}: choose one of {', '.join(_SORTS)}.")
    ascending = query.get("direction", "-1") == "1"
    cursor = query.get("cursor")
    expanded = {*query.getlist("expand"), *query.getlist("expand[]")}
    full = query_flag(request, "full")
    with_card = full or query_flag(request, "cardData") or "cardData" in expanded
    with_files = full or "siblings" in expanded
    is_there_any = not query_flag(request, "gated")  # No repository here is gated.
    identity = identity_of(request)

    def read() -> Response:
        with hub.database.read() as connection:
            heads = _heads(connection)
            present = hub.repositories.all(connection) if is_there_any else []

        def key(repository: Repository) -> str:
            """A text by which the list is sorted. The key of the last item on a page is the cursor
            of the next page."""
            is_by_change = sort == "lastModified"
            time = _modified(repository, heads) if is_by_change else repository.created_at
            return f"{time:020.6f}-{repository.id}"

        chosen = sorted(
            (
                repository
                for repository in present
                if repository.name.type == type
                and identity.may_see(repository)
                and author in ("", repository.name.owner.lower())
                and all(text in repository.name.id.lower() for text in searched)
                and (not tags or tags <= _tags(repository, heads))
                and (not task or task in _card(repository, heads).texts("pipeline_tag"))
            ),
            key=key,
            reverse=not ascending,
        )
        if cursor is not None:
            chosen = [one for one in chosen if _is_after(key(one), cursor, ascending)]
        items = [
            _described(one, heads, with_card=with_card, with_files=with_files)
            for one in chosen[:limit]
        ]
        has_more = len(chosen) > limit
        headers = next_page(request, {"cursor": key(chosen[limit - 1])}) if has_more else None
        return JSONResponse(items, headers=headers)

    return await run_in_threadpool(read)


def _is_after(key: str, cursor: str, ascending: bool) -> bool:
    return key > cursor if ascending else key < cursor


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


def _described(repository: Repository, heads: Heads, *, with_card: bool, with_files: bool) -> Json:
    sha = heads.get(repository.id)
    described = {
        **facts(repository),
        "sha": sha,
        "lastModified": iso_time(_modified(repository, heads)),
    }
    card = _card(repository, heads)
    described |= facts_of_card(repository, card)
    if with_card:
        described["cardData"] = card.metadata
    if with_files:
        entries = list_tree(repository, sha, recursive=True) if sha else []
        files = [entry.path for entry in entries if entry.type == "file"]
        described["siblings"] = [{"rfilename": path} for path in files]
    return described


def _tags(repository: Repository, heads: Heads) -> set[str]:
    return {tag.lower() for tag in _card(repository, heads).tags_of(repository.name.type)}


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
