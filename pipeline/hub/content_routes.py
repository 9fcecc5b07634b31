"""API: what is in a repository. Listings, trees, commits, and the files themselves with ranges."""

from collections.abc import Sequence
from functools import partial
from html import escape
from urllib.parse import parse_qs

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from pipeline.hub import file_answers
from pipeline.hub.contents import (
    SMALL_FILE_BYTES,
    Entry,
    find_file,
    find_paths,
    list_commits,
    list_tree,
    read_file,
    resolve_revision,
    stream_file,
)
from pipeline.hub.errors import (
    BadRequest,
    EntryNotFound,
    LargeFileNotFound,
    RevisionNotFound,
)
from pipeline.hub.http_json import iso_time, next_page, query_int, read_body
from pipeline.hub.large_files import LargeFiles
from pipeline.hub.names import RepositoryName, RepositoryType, file_path
from pipeline.hub.repositories import Repository
from pipeline.hub.service import Hub
from pipeline.pointers import Pointer, may_be_pointer

COMMITS_PER_PAGE = 1000
MAX_PATHS = 10_000

Json = dict[str, object]


async def list_repositories(request: Request, hub: Hub, type: RepositoryType) -> Response:
    author = request.query_params.get("author")
    search = request.query_params.get("search", "").lower()
    limit = query_int(request, "limit", 1000, at_most=1000)

    def read() -> list[Json]:
        with hub.database.read() as connection:
            found = hub.repositories.all(connection)
        wanted = [
            repository
            for repository in sorted(found, key=lambda one: one.created_at, reverse=True)
            if repository.name.type == type
            and author in (None, repository.name.owner)
            and search in repository.name.id.lower()
        ]
        return [_facts(repository) for repository in wanted[:limit]]

    return JSONResponse(await run_in_threadpool(read))


async def describe(
    request: Request, hub: Hub, name: RepositoryName, rest: Sequence[str]
) -> Response:
    """Repository info; only where a revision is named must there be a commit."""
    with_sizes = request.query_params.get("blobs", "").lower() in ("1", "true")

    def read() -> Json:
        repository = hub.find(name)
        try:
            commit = resolve_revision(repository, "/".join(rest) or "main")
        except RevisionNotFound:
            if rest:
                raise
            return {**_facts(repository), "sha": None, "siblings": []}
        [newest] = list_commits(repository, commit, skip=0, limit=1)
        entries = list_tree(repository, commit, recursive=True)
        return {
            **_facts(repository),
            "sha": commit,
            "lastModified": iso_time(newest.committed_at),
            "siblings": [_sibling(entry, with_sizes) for entry in entries if entry.type == "file"],
        }

    return JSONResponse(await run_in_threadpool(read))


async def tree(request: Request, hub: Hub, name: RepositoryName, rest: Sequence[str]) -> Response:
    recursive = request.query_params.get("recursive", "").lower() in ("1", "true")

    def read() -> list[Json]:
        repository = hub.find(name)
        commit = resolve_revision(repository, rest[0] if rest else "main")
        folder = _path_in(name, commit, rest[1:]) if any(rest[1:]) else ""
        return [
            _entry(entry) for entry in list_tree(repository, commit, folder, recursive=recursive)
        ]

    return JSONResponse(await run_in_threadpool(read))


async def paths_info(
    request: Request, hub: Hub, name: RepositoryName, rest: Sequence[str]
) -> Response:
    try:
        form = parse_qs((await read_body(request)).decode(), max_num_fields=MAX_PATHS)
    except ValueError as error:
        raise BadRequest(f"The form cannot be read: {error}.") from None
    paths = [path for path in form.get("paths", []) if _is_path(path)]

    def read() -> list[Json]:
        repository = hub.find(name)
        commit = resolve_revision(repository, "/".join(rest) or "main")
        return [_entry(entry) for entry in find_paths(repository, commit, paths)]

    return JSONResponse(await run_in_threadpool(read))


async def commits(
    request: Request, hub: Hub, name: RepositoryName, rest: Sequence[str]
) -> Response:
    """Pages by `p`, from 0; links name the first page's sha, so that a push shifts nothing."""
    page = query_int(request, "p", 0, at_most=10**6)
    limit = max(1, query_int(request, "limit", COMMITS_PER_PAGE, at_most=COMMITS_PER_PAGE))
    formatted = "formatted" in request.query_params.getlist("expand[]")

    def read() -> Response:
        repository = hub.find(name)
        revision = request.query_params.get("at") or "/".join(rest) or "main"
        commit = resolve_revision(repository, revision)
        found = list_commits(repository, commit, skip=page * limit, limit=limit + 1)
        items: list[Json] = []
        for one in found[:limit]:
            item: Json = {
                "id": one.sha,
                "title": one.title,
                "message": one.message,
                "date": iso_time(one.committed_at),
                "authors": [{"user": one.author}],
            }
            if formatted:
                item["formatted"] = {"title": escape(one.title), "message": escape(one.message)}
            items.append(item)
        more = len(found) > limit
        return JSONResponse(
            items, headers=next_page(request, {"p": page + 1, "at": commit}) if more else None
        )

    return await run_in_threadpool(read)


async def resolve(
    request: Request, hub: Hub, name: RepositoryName, revision: str, rest: Sequence[str]
) -> Response:
    """A file's bytes, or for HEAD what a client must know to cache them. Where git has a pointer,
    they are those of the large file."""
    return await _file(request, hub, name, revision, rest, follow=True)


async def raw(
    request: Request, hub: Hub, name: RepositoryName, revision: str, rest: Sequence[str]
) -> Response:
    """As `resolve`, but a pointer is answered as it is."""
    return await _file(request, hub, name, revision, rest, follow=False)


async def _file(
    request: Request,
    hub: Hub,
    name: RepositoryName,
    revision: str,
    rest: Sequence[str],
    *,
    follow: bool,
) -> Response:

    def read() -> tuple[Repository, str, Entry]:
        repository = hub.find(name)
        try:
            path = file_path(rest)
        except BadRequest as error:
            commit = resolve_revision(repository, revision)
            raise EntryNotFound(str(error), commit=commit) from None
        return repository, *find_file(repository, revision, path)

    repository, commit, file = await run_in_threadpool(read)
    headers = {"X-Repo-Commit": commit, "ETag": f'"{file.oid}"'}
    look_inside = follow and may_be_pointer(file.size_bytes)
    if look_inside or (request.method == "GET" and file.size_bytes <= SMALL_FILE_BYTES):
        content = await run_in_threadpool(read_file, repository, file)
        if look_inside and (pointer := Pointer.parse(content)) is not None:
            return await _large_file(request, repository, commit, file, pointer)
        return file_answers.answer_small(request, content, headers)
    return file_answers.answer(
        request, file.size_bytes, headers, partial(stream_file, repository, file)
    )


async def _large_file(
    request: Request, repository: Repository, commit: str, file: Entry, pointer: Pointer
) -> Response:
    files = LargeFiles(repository.folder)
    size = await run_in_threadpool(files.size, pointer.oid)
    if size is None:
        raise LargeFileNotFound(
            f"{file.path} of the {repository.name} is a large file whose content ({pointer.oid}) "
            "is not here: push it from a clone that has it, with `git lfs push --all <this hub>`.",
            headers={"X-Repo-Commit": commit},
        )
    tag = f'"{pointer.oid}"'
    headers = {
        "X-Repo-Commit": commit,
        "ETag": tag,
        "X-Linked-Etag": tag,
        "X-Linked-Size": str(size),
    }
    return file_answers.answer(request, size, headers, partial(files.read, pointer.oid))


def _facts(repository: Repository) -> Json:
    return {
        "_id": repository.id,
        "id": repository.name.id,
        "author": repository.name.owner,
        "private": repository.private,
        "gated": False,
        "disabled": False,
        "tags": [],
        "downloads": 0,
        "likes": 0,
        "createdAt": iso_time(repository.created_at),
        "lastModified": iso_time(repository.created_at),
    }


def _entry(entry: Entry) -> Json:
    facts: Json = {"type": entry.type, "path": entry.path, "oid": entry.oid}
    facts["size"] = entry.content_bytes if entry.type == "file" else 0
    if entry.lfs is not None:
        facts["lfs"] = {"oid": entry.lfs.oid, **_sizes(entry, entry.lfs)}
    return facts


def _sibling(entry: Entry, with_sizes: bool) -> Json:
    if not with_sizes:
        return {"rfilename": entry.path}
    facts: Json = {"rfilename": entry.path, "size": entry.content_bytes, "blobId": entry.oid}
    if entry.lfs is not None:
        facts["lfs"] = {"sha256": entry.lfs.oid, **_sizes(entry, entry.lfs)}
    return facts


def _sizes(entry: Entry, pointer: Pointer) -> Json:
    return {"size": pointer.size, "pointerSize": entry.size_bytes}


def _path_in(name: RepositoryName, commit: str, parts: Sequence[str]) -> str:
    try:
        return file_path(parts)
    except BadRequest as error:
        raise EntryNotFound(f"The {name} has none such: {error}", commit=commit) from None


def _is_path(path: str) -> bool:
    try:
        return bool(file_path([path]))
    except BadRequest:
        return False
