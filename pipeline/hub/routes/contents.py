"""API routes that read a repository: its description, trees, commits and files."""

from collections.abc import Sequence
from functools import partial
from html import escape
from urllib.parse import parse_qs

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from pipeline.hub.contents.cards import README, Card, read_card
from pipeline.hub.contents.history import last_commits, list_commits, resolve_revision
from pipeline.hub.contents.trees import (
    SMALL_FILE_BYTES,
    Entry,
    find_file,
    find_paths,
    list_tree,
    read_file,
    stream_file,
)
from pipeline.hub.errors import BadRequest, EntryNotFound, LargeFileNotFound, RevisionNotFound
from pipeline.hub.http_json import iso_time, next_page, query_flag, query_int, read_body
from pipeline.hub.large_files.store import LargeFiles
from pipeline.hub.repositories.names import RepositoryName, stored_path
from pipeline.hub.repositories.store import Repository
from pipeline.hub.routes import file_answers
from pipeline.hub.service import Hub
from pipeline.hub.tokens.auth import identity_of
from pipeline.pointers import Pointer, may_be_pointer

COMMITS_PER_PAGE = 1000
MAX_PATHS = 10_000

Json = dict[str, object]


async def describe(
    request: Request, hub: Hub, name: RepositoryName, rest: Sequence[str]
) -> Response:
    """Describes the repository at a revision (`rest`, by default `main`). If the request names no
    revision and `main` does not exist, the description has no files. Raises RevisionNotFound if the
    request names a revision that does not exist."""
    with_sizes = query_flag(request, "blobs")

    def read() -> Json:
        repository = hub.find(name)
        try:
            commit = resolve_revision(repository, "/".join(rest) or "main")
        except RevisionNotFound:
            if rest:
                raise
            return {**facts(repository), "sha": None, "siblings": []}
        [newest] = list_commits(repository, commit, skip=0, limit=1)
        entries = list_tree(repository, commit, recursive=True)
        readme = next((one for one in entries if one.path == README and one.type == "file"), None)
        card = Card() if readme is None else read_card(repository.folder, readme.oid)
        return {
            **facts(repository),
            **facts_of_card(repository, card),
            "cardData": card.metadata,
            "sha": commit,
            "lastModified": iso_time(newest.committed_at),
            "siblings": [_sibling(entry, with_sizes) for entry in entries if entry.type == "file"],
        }

    return JSONResponse(await run_in_threadpool(read))


async def tree(request: Request, hub: Hub, name: RepositoryName, rest: Sequence[str]) -> Response:
    recursive = query_flag(request, "recursive")
    expand = query_flag(request, "expand")

    def read() -> list[Json]:
        repository = hub.find(name)
        commit = resolve_revision(repository, rest[0] if rest else "main")
        folder = _path_in(name, commit, rest[1:]) if any(rest[1:]) else ""
        entries = list_tree(repository, commit, folder, recursive=recursive)
        return _entries(repository, commit, entries, expand=expand)

    return JSONResponse(await run_in_threadpool(read))


async def paths_info(
    request: Request, hub: Hub, name: RepositoryName, rest: Sequence[str]
) -> Response:
    try:
        form = parse_qs((await read_body(request)).decode(), max_num_fields=MAX_PATHS)
    except ValueError as error:
        raise BadRequest(
            f"The form cannot be read ({error}): send it in UTF-8, with at most {MAX_PATHS} fields."
        ) from None
    paths = [path for path in form.get("paths", []) if _is_path(path)]
    expand = form.get("expand", [""])[0].lower() in ("1", "true")

    def read() -> list[Json]:
        repository = hub.find_reached(name, identity_of(request))
        commit = resolve_revision(repository, "/".join(rest) or "main")
        entries = find_paths(repository, commit, paths)
        items = _entries(repository, commit, entries, expand=expand)
        for entry, item in zip(entries, items, strict=True):
            if entry.lfs is not None and not expand:
                # `huggingface_hub` copies a large file to another repository only if the file has a
                # Xet hash. The client neither checks nor uses this hash, so the sha256 is enough.
                # A copy asks without `expand`. Only `HfFileSystem` asks with it, and would download
                # a file with a Xet hash over Xet, which this hub does not have.
                item["xetHash"] = entry.lfs.oid
        return items

    return JSONResponse(await run_in_threadpool(read))


async def commits(
    request: Request, hub: Hub, name: RepositoryName, rest: Sequence[str]
) -> Response:
    """The commits, newest first. `?p=` is the number of the page, from 0. The link to the next page
    also has the sha of the newest commit on the first page (`at`). So a push between two pages does
    not change which commits are on which page."""
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
    """The bytes of a file. If git has a pointer there, the bytes of the large file that it names.
    HEAD gets only the headers, which a client needs for its cache."""
    return await _file(request, hub, name, revision, rest, follow=True)


async def raw(
    request: Request, hub: Hub, name: RepositoryName, revision: str, rest: Sequence[str]
) -> Response:
    """The bytes of a file as git has them. For a large file these are the bytes of its pointer."""
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
            path = stored_path(rest)
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
            f"{file.path} of the {repository.name} is a large file, and the hub does not have its "
            f"content ({pointer.oid}): push it from a clone that has it, with "
            "`git lfs push --all <this hub>`.",
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


def facts(repository: Repository) -> Json:
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


def facts_of_card(repository: Repository, card: Card) -> Json:
    """The facts that can be in a list without the whole card. The Hugging Face Hub also infers the
    task and the library of a model from its files; this hub takes them from the card only."""
    told: Json = {"tags": card.texts("tags")}
    if repository.name.type == "model":
        told |= {key: text for key in ("pipeline_tag", "library_name") for text in card.texts(key)}
    return told


def _entries(
    repository: Repository, commit: str, entries: Sequence[Entry], *, expand: bool
) -> list[Json]:
    items = [_entry(entry) for entry in entries]
    if expand:
        found = last_commits(repository, commit, [entry.path for entry in entries])
        for entry, item in zip(entries, items, strict=True):
            if (last := found.get(entry.path)) is not None:
                date = iso_time(last.committed_at)
                item["lastCommit"] = {"id": last.sha, "title": last.title, "date": date}
    return items


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
        return stored_path(parts)
    except BadRequest as error:
        raise EntryNotFound(f"The {name} has no such folder: {error}", commit=commit) from None


def _is_path(path: str) -> bool:
    try:
        return bool(stored_path([path]))
    except BadRequest:
        return False
