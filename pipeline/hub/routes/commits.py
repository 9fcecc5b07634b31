"""API routes for commits: `validate-yaml` checks a README before a client commits it, `preupload`
tells a client how to send each file, and `commit` makes the commit."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from io import SEEK_END
from typing import IO, Annotated

from fastapi import APIRouter, Depends
from pydantic import Base64Bytes, BaseModel, Field
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse

from jobs.spec import DEFAULT_BRANCH
from pipeline.hub.commits import (
    MAX_GIT_BYTES,
    Build,
    Change,
    Commit,
    CommitHeader,
    build_commit,
    first_commit,
    make_commit,
    parse_commit,
)
from pipeline.hub.contents import (
    IGNORE_FILE,
    find_paths,
    ignored_paths,
    large_file_paths,
    parse_card,
    read_path,
    resolve_revision,
)
from pipeline.hub.errors import Conflict, RevisionNotFound
from pipeline.hub.events import EventLog, record_ref_changes
from pipeline.hub.git import PULL_REQUEST_PREFIX
from pipeline.hub.http_json import MAX_BODY_BYTES, Json, client_warning, hub_url, json_body
from pipeline.hub.large_files import CHUNK_BYTES, LargeFiles
from pipeline.hub.repositories import (
    RefChange,
    Repository,
    RepositoryName,
    changed_path,
    new_file_path,
    open_bases,
    read_refs,
    remember,
)
from pipeline.hub.routes.discussions import MAX_TEXT, MAX_TITLE, open_discussion, ref_of
from pipeline.hub.service import API, Hub, HubOf, Identity, Named, Received, Writer, readable

MAX_README_BYTES = 4 * MAX_BODY_BYTES
"""A README may have images in it."""


class PlannedFile(BaseModel):
    path: str
    size: int = Field(ge=0)
    sample: Base64Bytes = b""
    """The first 512 bytes of the file."""


def is_large(size: int, sample: bytes) -> bool:
    """Whether the file is too large for git, or binary: its first bytes have a NUL byte."""
    return size > MAX_GIT_BYTES or b"\0" in sample


class Preupload(BaseModel):
    files: tuple[PlannedFile, ...]
    gitIgnore: str | None = None


class Readme(BaseModel):
    content: str


Made = tuple[str, Sequence[RefChange], int | None]
"""The sha of a commit, the changes about which the hub may have remarks for the client, and the
number of the pull request that it opened."""
Act = Callable[[EventLog, Repository, Identity, str, Commit], Made]
Files = Mapping[str, IO[bytes] | None]
"""The contents of files by their paths. None deletes the file."""

router = APIRouter()
checks = APIRouter()


@checks.post("/api/validate-yaml")
async def validate_yaml(
    hub: HubOf, body: Annotated[Readme, json_body(Readme, max_bytes=MAX_README_BYTES)]
) -> JSONResponse:
    """Answers 400 if the README has errors, so that the client does not commit it. With warnings
    only, the client may commit it.

    It needs no token, because its answer depends only on the body, and `metadata_update` and
    `DatasetCard.push_to_hub` of `huggingface_hub` call it without a token."""
    async with hub.card_slots:
        card = await run_in_threadpool(parse_card, body.content)
    errors = [] if card.error is None else [{"message": card.error}]
    return JSONResponse({"errors": errors, "warnings": []}, status_code=400 if errors else 200)


@router.post(f"{API}/preupload/{{revision:rest}}")
async def preupload(
    hub: HubOf,
    identity: Writer,
    name: Named,
    body: Annotated[Preupload, json_body(Preupload)],
    revision: str,
) -> Json:
    """Says for each file whether the client sends it in the commit (`regular`) or before the commit
    (`lfs`), and whether `.gitignore` excludes it. Also gives the id of the present file at the same
    path: the sha256 of a large file, or else the sha of the blob. If the client's file has the same
    id, the client does not send it."""
    paths = [new_file_path(file.path) for file in body.files]
    find = partial(hub.repositories.find, name)
    # Most repositories have a commit, and then the request need not wait for the lock.
    if not await run_in_threadpool(lambda: read_refs(find())):
        async with hub.locked(name) as repository:
            await run_in_threadpool(begin, hub.log, repository, identity)

    def read() -> list[Json]:
        repository = find()
        _, head = find_branch(repository, revision)
        assert head is not None  # there is a commit, see above
        tracked = large_file_paths(repository, head, paths)
        given = body.gitIgnore
        patterns = read_path(repository, head, IGNORE_FILE) if given is None else given.encode()
        ignored = ignored_paths(repository, patterns, paths) if patterns else set()
        there = {
            each.path: each.oid if each.lfs is None else each.lfs.oid
            for each in find_paths(repository, head, paths)
            if each.type == "file"
        }
        return [
            {
                "path": file.path,
                "uploadMode": "lfs"
                if path in tracked or is_large(file.size, file.sample)
                else "regular",
                "shouldIgnore": path in ignored,
                "oid": there.get(path),
            }
            for file, path in zip(body.files, paths, strict=True)
        ]

    return {"files": await run_in_threadpool(read)}


@router.post(f"{API}/commit/{{revision:rest}}", dependencies=[Depends(readable)])
async def commit(
    request: Request,
    hub: HubOf,
    identity: Writer,
    name: Named,
    file: Received,
    revision: str,
    create_pr: bool = False,
) -> JSONResponse:
    """Makes one commit with all operations, or fails and makes none. With `create_pr`, the commit
    goes to a new pull request."""
    act = commit_to_pull_request if create_pr else commit_to_branch
    async with hub.commit_slots:
        wanted = await run_in_threadpool(parse_commit, file)
    sha, repository, num, remarks = await make(hub, identity, name, revision, wanted, act)
    web = f"{hub_url(request)}/{repository.name.path}"
    answer: Json = {"success": True, "commitOid": sha, "commitUrl": f"{web}/commit/{sha}"}
    if num is not None:
        answer["pullRequestUrl"] = f"{web}/discussions/{num}"
    return JSONResponse(answer, headers=client_warning(sha, remarks))


async def make(
    hub: Hub, identity: Identity, name: RepositoryName, revision: str, wanted: Commit, act: Act
) -> tuple[str, Repository, int | None, Sequence[str]]:
    """Makes the commit. Returns its sha, its repository, the number of the pull request that it
    opened, and the remarks for the client."""
    # Find the repository again: while the body came in, another one may have got its name. Take the
    # slot after the lock. Otherwise a request that waits for the lock would hold a slot, which
    # another request could use.
    async with hub.locked(name) as repository, hub.commit_slots:
        made = await run_in_threadpool(act, hub.log, repository, identity, revision, wanted)
        sha, changes, num = made
        remarks = await run_in_threadpool(hub.remarks, repository, changes)
    return sha, repository, num, remarks


async def commit_contents(
    hub: Hub,
    identity: Identity,
    name: RepositoryName,
    revision: str,
    parent: str | None,
    summary: str,
    files: Files,
    build: Build = build_commit,
) -> str:
    """Makes a commit of these files, by their paths, on top of the commit `parent`, and returns its
    sha. Raises PreconditionFailed if the branch is at another commit."""
    header = CommitHeader(summary=summary, parentCommit=parent)
    repository = await run_in_threadpool(hub.repositories.find, name)

    def changes() -> list[Change]:
        tracked = set() if parent is None else large_file_paths(repository, parent, files)
        return [_change(repository, *each, is_tracked=each[0] in tracked) for each in files.items()]

    wanted = Commit(header=header, changes=await run_in_threadpool(changes))
    made = await make(hub, identity, name, revision, wanted, partial(commit_to_branch, build=build))
    return made[0]


def _change(
    repository: Repository, path: str, file: IO[bytes] | None, *, is_tracked: bool
) -> Change:
    """The change of the file. Stores a large one, as a client would before its commit."""
    if file is None:
        return Change(path=changed_path(path), kind="deletedFile")

    def read(size: int = -1) -> bytes:
        file.seek(0)
        return file.read(size)

    path, size = new_file_path(path), file.seek(0, SEEK_END)
    if not is_tracked and not is_large(size, read(512)):
        return Change(path=path, read=read)
    file.seek(0)
    pieces = iter(partial(file.read, CHUNK_BYTES), b"")
    oid = LargeFiles(repository.folder).store(pieces, None, size)
    return Change(path=path, kind="lfsFile", oid=oid)


def begin(log: EventLog, repository: Repository, identity: Identity) -> None:
    """Makes the first commit if the repository has no commit. On the Hugging Face Hub every
    repository has a commit, and clients such as `Dataset.push_to_hub` fail without it. No event is
    stored, because the first commit brings no data."""
    if read_refs(repository):
        return
    first = first_commit(repository, identity.signature)
    with log.database.write() as connection:
        remember(connection, repository, [first])


def commit_to_branch(
    log: EventLog,
    repository: Repository,
    identity: Identity,
    revision: str,
    wanted: Commit,
    build: Build = build_commit,
) -> Made:
    ref, head = find_branch(repository, revision)
    if ref.startswith(PULL_REQUEST_PREFIX) and ref not in open_bases(log.database, repository):
        raise Conflict(
            f"The pull request of {ref} is merged or closed, so it takes no commits: reopen it if "
            "it is closed, or open another one."
        )
    sha = make_commit(repository, ref, head, wanted, identity.signature, build)
    return sha, () if sha == head else record_ref_changes(repository, log), None


def commit_to_pull_request(
    log: EventLog, repository: Repository, identity: Identity, revision: str, wanted: Commit
) -> Made:
    """Makes the commit on a new pull request. The commit's parent is the commit that the client
    names, or else the head of the branch."""
    base, head = find_branch(repository, revision, or_pull_request=False)
    header = wanted.header
    parent = header.parentCommit
    start = head if parent is None else resolve_revision(repository, parent)
    sha = build_commit(repository, start, wanted, identity.signature)
    opened = open_discussion(
        log,
        repository,
        identity,
        title=" ".join(header.summary.split())[:MAX_TITLE],
        text=(header.description or header.summary)[:MAX_TEXT],
        base=base,
        head=sha,
    )
    return sha, [RefChange(ref=ref_of(opened.num), old_sha=start, new_sha=sha)], opened.num


def find_branch(
    repository: Repository, revision: str, *, or_pull_request: bool = True
) -> tuple[str, str | None]:
    """The full name of the branch, and the sha of its head. With `or_pull_request`, the ref of a
    pull request counts as a branch. The sha is None for the default branch of a repository without
    commits. Raises RevisionNotFound for any other branch that does not exist."""
    refs = read_refs(repository)
    ref = revision if revision.startswith("refs/") else f"refs/heads/{revision}"
    is_branch = ref.startswith("refs/heads/") or (
        or_pull_request and ref.startswith(PULL_REQUEST_PREFIX)
    )
    if not is_branch or (ref not in refs and (refs or ref != DEFAULT_BRANCH)):
        raise RevisionNotFound(
            f"The {repository.name} has no branch {revision!r}, and a commit can only be made on "
            "a branch: create the branch first."
        )
    return ref, refs.get(ref)
