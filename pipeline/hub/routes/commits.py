"""API routes for commits: `validate-yaml` checks a README before a client commits it, `preupload`
tells a client how to send each file, and `commit` makes the commit."""

import base64
import binascii
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from tempfile import TemporaryFile

from pydantic import BaseModel, ConfigDict, Field
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from pipeline.hub.actions.commits import (
    MadeCommit,
    begin,
    commit_to_branch,
    commit_to_pull_request,
    find_branch,
)
from pipeline.hub.commits.body import CommitBody
from pipeline.hub.commits.changes import MAX_GIT_BYTES, attributes_files
from pipeline.hub.contents.attributes import IGNORE_FILE, ignored_paths, large_file_paths
from pipeline.hub.contents.cards import parse_card
from pipeline.hub.contents.trees import Entry, read_tree
from pipeline.hub.errors import BadRequest
from pipeline.hub.git.process import git
from pipeline.hub.http_json import (
    MAX_BODY_BYTES,
    client_warning,
    hub_url,
    read_json,
    receive_into,
)
from pipeline.hub.repositories.names import (
    RepositoryName,
    new_file_path,
)
from pipeline.hub.repositories.objects import pointers_of
from pipeline.hub.repositories.refs import read_refs
from pipeline.hub.repositories.store import Repository
from pipeline.hub.service import Hub, hub_of
from pipeline.hub.tokens.auth import Identity, identity_of

MAX_README_BYTES = 4 * MAX_BODY_BYTES
"""A README may have images in it. A client without a token can send `MAX_BODY_BYTES`."""


class PlannedFile(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    path: str
    size: int = Field(ge=0)
    sample: str = ""
    """The first 512 bytes of the file, in base64."""


class Preupload(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    files: tuple[PlannedFile, ...]
    gitIgnore: str | None = None


class Readme(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    content: str


def routes() -> list[Route]:
    return [Route("/api/validate-yaml", validate_yaml, methods=["POST"])]


async def validate_yaml(request: Request) -> Response:
    """Answers 400 if the README has errors, so that the client does not commit it. With warnings
    only, the client may commit it."""
    is_anonymous = identity_of(request).is_anonymous
    max_bytes = MAX_BODY_BYTES if is_anonymous else MAX_README_BYTES
    body = await read_json(request, Readme, max_bytes=max_bytes)
    async with hub_of(request).anonymous_check if is_anonymous else nullcontext():
        card = await run_in_threadpool(parse_card, body.content)
    return JSONResponse(
        {
            "errors": [{"message": message} for message in card.errors],
            "warnings": [{"message": message} for message in card.warnings],
        },
        status_code=400 if card.errors else 200,
    )


async def preupload(
    request: Request, hub: Hub, name: RepositoryName, rest: Sequence[str]
) -> Response:
    """Says for each file whether the client sends it in the commit (`regular`) or before the commit
    (`lfs`), and whether `.gitignore` excludes it. Also gives the id of the present file at the same
    path."""
    body = await read_json(request, Preupload)
    paths = [new_file_path(file.path) for file in body.files]
    identity = identity_of(request)
    await _begin(hub, name, identity)

    def read() -> list[dict[str, object]]:
        repository = hub.find_reached(name, identity)
        _, head = find_branch(repository, "/".join(rest))
        tree = read_tree(repository, head)
        tracked = large_file_paths(repository, attributes_files(tree), paths)
        ignored = _ignored(repository, tree, body.gitIgnore, paths)
        there = _oids(repository, tree, paths)
        return [
            {
                "path": file.path,
                "uploadMode": "lfs" if path in tracked or _is_large(file) else "regular",
                "shouldIgnore": path in ignored,
                "oid": there.get(path),
            }
            for file, path in zip(body.files, paths, strict=True)
        ]

    return JSONResponse({"files": await run_in_threadpool(read)})


async def _begin(hub: Hub, name: RepositoryName, identity: Identity) -> None:
    """Makes the first commit if the repository has no commit."""
    # Most repositories have a commit, and then the request need not wait for the lock.
    if not await run_in_threadpool(lambda: read_refs(hub.find(name))):
        async with hub.locked(name, identity) as repository:
            await run_in_threadpool(begin, hub.log, repository, identity)


async def commit(request: Request, hub: Hub, name: RepositoryName, rest: Sequence[str]) -> Response:
    """Makes one commit with all operations, or fails and makes none. With `?create_pr=1`, the
    commit goes to a new pull request."""
    identity = identity_of(request)
    identity.require_write("a commit")
    await run_in_threadpool(hub.find, name)
    revision, opens = "/".join(rest), request.query_params.get("create_pr") in ("1", "true")
    with TemporaryFile(dir=hub.repositories.incoming) as file:
        await receive_into(file, request, max_bytes=hub.settings.max_push_bytes)
        async with hub.commit_slots:
            body = await run_in_threadpool(CommitBody, file)
        act = commit_to_pull_request if opens else commit_to_branch
        # Take the slot after the lock. Otherwise a request that waits for the lock would hold a
        # slot, which another request could use.
        async with hub.locked(name, identity) as repository, hub.commit_slots:
            made = await run_in_threadpool(act, hub.log, repository, identity, revision, body)
            remarks = await run_in_threadpool(_remarks, hub, repository, made)
    hub.log.wake()
    web = f"{hub_url(request)}/{repository.name.path}"
    answer: dict[str, object] = {
        "success": True,
        "commitOid": made.sha,
        "commitUrl": f"{web}/commit/{made.sha}",
        "hookOutput": "\n".join(remarks),
    }
    if made.pull_request is not None:
        answer["pullRequestUrl"] = f"{web}/discussions/{made.pull_request}"
    return JSONResponse(answer, headers=client_warning(made.sha, remarks))


def _remarks(hub: Hub, repository: Repository, made: MadeCommit) -> Sequence[str]:
    return hub.remarks_on(repository, made.changes) if made.changes else ()


def _ignored(
    repository: Repository, tree: Mapping[str, Entry], given: str | None, paths: Sequence[str]
) -> set[str]:
    """The paths that `.gitignore` excludes: the `.gitignore` that the client sends (`given`), or
    else the `.gitignore` in the repository."""
    if given is not None:
        return ignored_paths(repository, given.encode(), paths)
    there = tree.get(IGNORE_FILE)
    if there is None or there.type != "file":
        return set()
    return ignored_paths(repository, git(repository.folder, "cat-file", "blob", there.oid), paths)


def _is_large(file: PlannedFile) -> bool:
    """Whether the file is too large for git, or binary. A file is binary if its sample has a NUL
    byte."""
    try:
        sample = base64.b64decode(file.sample, validate=True)
    except binascii.Error:
        raise BadRequest(
            f"The sample of {file.path!r} is not valid base64: encode it again."
        ) from None
    return file.size > MAX_GIT_BYTES or b"\0" in sample


def _oids(
    repository: Repository, tree: Mapping[str, Entry], paths: Sequence[str]
) -> Mapping[str, str]:
    """Maps each of `paths` that exists to the id of its file: the sha256 of a large file, or else
    the sha of the blob. If the client's file has the same id, the client does not send the file."""
    there = {path: tree[path].oid for path in paths if path in tree and tree[path].type == "file"}
    pointers = pointers_of(repository, set(there.values()))
    return {path: pointers[oid].oid if oid in pointers else oid for path, oid in there.items()}
