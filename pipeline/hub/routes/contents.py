"""API routes that list repositories, and describe one, its trees, commits and files."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from functools import lru_cache
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Annotated
from urllib.parse import parse_qs

from fastapi import APIRouter, Depends, Query
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse

from pipeline.hub.contents import (
    README,
    Entry,
    find_paths,
    list_commits,
    list_tree,
    parse_card,
    read_path,
    resolve_revision,
)
from pipeline.hub.errors import BadRequest, EntryNotFound, NotFound, NotSupported, RevisionNotFound
from pipeline.hub.git import git
from pipeline.hub.http_json import Json, file_answer, iso_time, read_body
from pipeline.hub.large_files import LargeFiles
from pipeline.hub.repositories import Repository, known_heads
from pipeline.hub.service import API, FILES, TYPES, HubOf, Readable

COMMITS_PER_PAGE = 1000
MAX_PATHS = 10_000
_QUERY = frozenset(
    {"author", "search", "pipeline_tag", "limit", "full", "cardData", "config", "expand"}
)

lists = APIRouter()
api = APIRouter(prefix=API)
files = APIRouter(prefix=FILES)


def list_repositories(
    request: Request,
    hub: HubOf,
    author: str = "",
    search: Annotated[Sequence[str], Query()] = (),
    pipeline_tag: str = "",
    limit: Annotated[int | None, Query(ge=1)] = None,
) -> JSONResponse:
    """The repositories of one type, the newest first. Raises NotSupported for a filter or an order
    that this hub does not have, because without it the list would be wrong."""
    if unknown := sorted(request.query_params.keys() - _QUERY):
        raise NotSupported(
            f"Lists by {', '.join(unknown)}: not supported by this hub. It lists by author, "
            "search, pipeline_tag and limit, the newest first."
        )
    type = TYPES[request.url.path.removeprefix("/api/")]
    with hub.database.read() as connection:
        heads = known_heads(connection)
    found = [
        described(repository, heads.get(repository.id))
        for repository in sorted(
            hub.repositories.all(), key=lambda each: each.created_at, reverse=True
        )
        if repository.name.type == type
        and author.lower() in ("", repository.name.owner.lower())
        and all(text.lower() in repository.name.id.lower() for text in search)
    ]
    shown = [each for each in found if pipeline_tag in ("", each.get("pipeline_tag"))]
    return JSONResponse(shown[:limit])


for _plural in TYPES:
    lists.get(f"/api/{_plural}")(list_repositories)


@api.get("")
def describe_newest(repository: Readable, blobs: bool = False) -> JSONResponse:
    """Describes the repository at `main`. Without a commit there, it has no files."""
    try:
        return describe(repository, "main", blobs)
    except RevisionNotFound:
        return JSONResponse({**described(repository, None), "siblings": []})


@api.get("/revision/{revision:rest}")
def describe(repository: Readable, revision: str, blobs: bool = False) -> JSONResponse:
    commit = resolve_revision(repository, revision)
    entries = list_tree(repository, commit, recursive=True)
    siblings = [_sibling(entry, blobs) for entry in entries if entry.type == "file"]
    return JSONResponse({**described(repository, commit), "siblings": siblings})


# FastAPI registers the lower one first: `Ada/tree/tree/main` is the repository `Ada/tree`.
@api.get("/tree/{revision:part}/{path:rest}")
@api.get("/tree/{revision:part}")
def tree(
    repository: Readable, revision: str, path: str = "", recursive: bool = False
) -> JSONResponse:
    commit = resolve_revision(repository, revision)
    entries = list_tree(repository, commit, path, recursive=recursive)
    return JSONResponse([_entry(entry) for entry in entries])


async def _form(request: Request) -> dict[str, list[str]]:
    try:
        return parse_qs((await read_body(request)).decode(), max_num_fields=MAX_PATHS)
    except ValueError as error:
        raise BadRequest(
            f"The form cannot be read ({error}): send it in UTF-8, with at most {MAX_PATHS} fields."
        ) from None


@api.post("/paths-info/{revision:rest}")
def paths_info(
    form: Annotated[dict[str, list[str]], Depends(_form)], repository: Readable, revision: str
) -> JSONResponse:
    commit = resolve_revision(repository, revision)
    entries = find_paths(repository, commit, form.get("paths", []))
    return JSONResponse([_entry(entry) for entry in entries])


@api.get("/commits/{revision:rest}")
def commits(
    request: Request,
    repository: Readable,
    revision: str,
    p: Annotated[int, Query(ge=0, lt=10**6)] = 0,
    limit: Annotated[int, Query(ge=1)] = COMMITS_PER_PAGE,
    at: str | None = None,
) -> JSONResponse:
    """The commits, newest first. `p` is the number of the page, from 0. The link to the next page
    also has the sha of the newest commit on the first page (`at`). So a push between two pages does
    not change which commits are on which page."""
    limit = min(limit, COMMITS_PER_PAGE)
    commit = resolve_revision(repository, at or revision)
    found = list_commits(repository, commit, skip=p * limit, limit=limit + 1)
    next_page = request.url.include_query_params(p=p + 1, at=commit)
    headers = {"Link": f'<{next_page}>; rel="next"'} if len(found) > limit else {}
    return JSONResponse(found[:limit], headers=headers)


async def until_sent() -> AsyncIterator[AsyncExitStack]:
    """Ends what is in it when the answer is sent, or the client is gone."""
    async with AsyncExitStack() as stack:
        yield stack


UntilSent = Annotated[AsyncExitStack, Depends(until_sent)]


@files.api_route("/resolve/{revision:part}/{path:rest}", methods=["GET", "HEAD"])
@files.api_route("/resolve/{revision:part}", methods=["GET", "HEAD"])
async def resolve(
    request: Request,
    hub: HubOf,
    repository: Readable,
    sent: UntilSent,
    revision: str,
    path: str = "",
) -> FileResponse:
    """The bytes of a file. If git has a pointer there, the bytes of the large file that it names.
    HEAD gets only the headers, which a client needs for its cache."""
    commit = await run_in_threadpool(resolve_revision, repository, revision)
    file = next(iter(await run_in_threadpool(find_paths, repository, commit, [path])), None)
    if file is None or file.type != "file":
        raise EntryNotFound(
            f"The {repository.name} has no file {path!r} at {revision}.", commit=commit
        )
    headers = {"X-Repo-Commit": commit}
    if file.lfs is None:
        # Clients that read slowly must not fill the disk with copies. They are in the system's
        # folder for such files, because the hub's disk may be full.
        await sent.enter_async_context(hub.git_slots["file"])
        copy = sent.enter_context(NamedTemporaryFile())  # noqa: SIM115
        if request.method == "HEAD":  # only the size of the file is sent
            copy.truncate(file.size_bytes)
        else:
            blob = ("cat-file", "blob", file.oid)
            await run_in_threadpool(git, repository.folder, *blob, into=copy)
        return file_answer(Path(copy.name), file.oid, headers)
    large = LargeFiles(repository.folder)
    if large.size(file.lfs.oid) is None:
        raise NotFound(
            f"{path} of the {repository.name} is a large file, and the hub does not have its "
            f"content ({file.lfs.oid}): push it from a clone that has it, with "
            "`git lfs push --all <this hub>`.",
            headers=headers,
        )
    return file_answer(large.path(file.lfs.oid), file.lfs.oid, headers)


@lru_cache(maxsize=10_000)
def described(repository: Repository, commit: str | None) -> Json:
    """The facts of the repository at a commit, with those of its card; or without a commit. The
    Hugging Face Hub also infers the task and the library of a model from its files; this hub takes
    them from the card only."""
    facts: Json = {
        "_id": repository.id,
        "id": repository.name.id,
        "author": repository.name.owner,
        "private": True,
        "tags": [],
        "createdAt": iso_time(repository.created_at),
        "lastModified": iso_time(repository.created_at),
        "sha": commit,
    }
    if commit is None:
        return facts
    [newest] = list_commits(repository, commit, limit=1)
    card = parse_card(read_path(repository, commit, README).decode(errors="replace"))
    facts |= {"lastModified": newest["date"], "tags": card.texts("tags"), "cardData": card.metadata}
    if repository.name.type == "model":
        facts |= {key: text for key in ("pipeline_tag", "library_name") for text in card.texts(key)}
    return facts


def _entry(entry: Entry) -> Json:
    size = entry.content_bytes if entry.type == "file" else 0
    facts: Json = {"type": entry.type, "path": entry.path, "oid": entry.oid, "size": size}
    return facts | _large(entry, "oid")


def _sibling(entry: Entry, with_sizes: bool) -> Json:
    facts: Json = {"rfilename": entry.path}
    if with_sizes:
        facts |= {"size": entry.content_bytes, "blobId": entry.oid, **_large(entry, "sha256")}
    return facts


def _large(entry: Entry, name: str) -> Json:
    """What is told of a large file. `name` is what its sha256 is called."""
    if entry.lfs is None:
        return {}
    sizes = {"size": entry.lfs.size, "pointerSize": entry.size_bytes}
    return {"lfs": {name: entry.lfs.oid, **sizes}}
