"""The batch API of Git LFS. It tells a client which files to send or fetch, and at which URLs. The
routes of these URLs are in `transfers.py`.

https://github.com/git-lfs/git-lfs/blob/main/docs/api/README.md
"""

import shutil
from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Scope

from pipeline.hub.errors import (
    BadRequest,
    Forbidden,
    NotSupported,
    RequestError,
    Unauthorized,
)
from pipeline.hub.git.backend import header
from pipeline.hub.http_json import error_headers, hub_url, read_json
from pipeline.hub.large_files import signatures
from pipeline.hub.large_files.store import LargeFiles
from pipeline.hub.repositories.names import RepositoryName, RepositoryType, requested_name
from pipeline.hub.repositories.store import Repository
from pipeline.hub.routes import transfers
from pipeline.hub.service import Hub
from pipeline.hub.tokens.auth import Identity, identity_of
from pipeline.pointers import OID

_MAX_OBJECTS = 10_000

Json = dict[str, object]


class _Body(BaseModel):
    # Newer clients may send fields that this version of the protocol does not have.
    model_config = ConfigDict(frozen=True, extra="ignore")


class LargeObject(_Body):
    oid: str
    size: int


class Batch(_Body):
    operation: Literal["upload", "download"]
    objects: tuple[LargeObject, ...] = Field(max_length=_MAX_OBJECTS)
    hash_algo: str = "sha256"


async def answer(request: Request, hub: Hub, name: RepositoryName, rest: Sequence[str]) -> Response:
    """Answers `info/lfs/<rest>` of a repository. As in a git URL, the path may leave out the type
    of the repository (`/owner/name` also finds a dataset). Errors have the form that `git lfs`
    prints."""
    try:
        repository = await run_in_threadpool(hub.find_as_git, name.type, name.owner, name.name)
        match request.method, *rest:
            case "POST", "objects", "batch":
                return await _batch(request, hub, repository)
            case "GET", "locks":
                return _json({"locks": []})
            # Before each push, `git lfs` also sends `locks/verify`. After 501 it prints nothing and
            # does not ask again. After 200 it would tell the user that this hub has locks.
            case "POST", "locks", *_:
                raise NotSupported(
                    "This hub has no locks for files, so nobody else has locked a file either: "
                    "push without a lock."
                )
        raise HTTPException(404)
    except RequestError as error:
        return _refusal(error)


def refusal_by_guard(scope: Scope, error: RequestError) -> Response | None:
    """The answer to a request of `git lfs` that was refused because of its token. None if the
    request does not come from `git lfs`."""
    if "/info/lfs/" not in scope["path"]:
        return None
    # After 401, `git lfs` asks its credential helper for a token again. A helper that has only the
    # wrong token would give it again and again, without end. So a wrong token gets 403.
    if isinstance(error, Unauthorized) and header(scope, b"authorization"):
        error = Forbidden(str(error))
    return _refusal(error)


def _refusal(error: RequestError) -> Response:
    return _json(
        {"message": str(error), "error": str(error)},
        status=error.status,
        headers=error_headers(error),
    )


async def _batch(request: Request, hub: Hub, repository: Repository) -> Response:
    batch = await read_json(request, Batch)
    if batch.hash_algo != "sha256":
        raise BadRequest(f"hash_algo is {batch.hash_algo!r}: this hub only knows sha256.")
    if batch.operation == "upload":
        identity_of(request).require_write("an upload of large files")
    offer = _Offer(hub, repository, hub_url(request), batch)
    objects = await run_in_threadpool(lambda: [offer.answer(each) for each in batch.objects])
    return _json({"transfer": "basic", "objects": objects, "hash_algo": "sha256"})


class Target(_Body):
    type: RepositoryType
    name: str


class FileToCopy(_Body):
    sha256: str


class Duplicate(_Body):
    target: Target
    files: tuple[FileToCopy, ...] = Field(max_length=_MAX_OBJECTS)


async def duplicate(
    request: Request, hub: Hub, name: RepositoryName, rest: Sequence[str]
) -> Response:
    """`lfs-files/duplicate`: copies large files of this repository to another one. The client calls
    this before it commits the pointers in the other repository."""
    if list(rest) != ["duplicate"]:
        raise HTTPException(404)
    body = await read_json(request, Duplicate)

    def act() -> list[Json]:
        identity = identity_of(request)
        source = hub.find_reached(name, identity)
        target = _target(hub, body.target, identity)
        files, copies = LargeFiles(source.folder), LargeFiles(target.folder)
        missing = [each.sha256 for each in body.files if not copies.link(files, each.sha256)]
        return [
            {
                "sha256": oid,
                "error": f"The {source.name} does not have this large file: push it there first.",
            }
            for oid in missing
        ]

    return JSONResponse({"failed": await run_in_threadpool(act)})


def _target(hub: Hub, target: Target, identity: Identity) -> Repository:
    """The repository that gets the files."""
    owner, slash, short = target.name.partition("/")
    parts = (owner, short) if slash else (hub.settings.owner, owner)
    return hub.find_reached(requested_name(target.type, *parts), identity)


class _Offer:
    """Makes the hub's answer for each file of one batch."""

    def __init__(self, hub: Hub, repository: Repository, url: str, batch: Batch) -> None:
        self._hub = hub
        self._repository = repository
        self._files = LargeFiles(repository.folder)
        self._url = url
        self._is_upload = batch.operation == "upload"
        self._free_bytes = shutil.disk_usage(repository.folder).free

    def answer(self, wanted: LargeObject) -> Json:
        told: Json = {"oid": wanted.oid, "size": wanted.size}
        error = self._error(wanted)
        if error is not None:
            return {**told, "error": {"code": error[0], "message": error[1]}}
        if not self._is_upload:
            return self._with_actions(told, {"download": self._signed("GET", wanted)})
        if self._files.keep(wanted.oid):
            return told
        actions: Json = {
            "upload": self._signed("PUT", wanted),
            "verify": self._signed("POST", wanted),
        }
        return self._with_actions(told, actions)

    def _error(self, wanted: LargeObject) -> tuple[int, str] | None:
        if not OID.fullmatch(wanted.oid):
            return 422, "The oid is not a sha256: write 64 hexadecimal digits in lower case."
        if wanted.size < 0:
            return 422, f"A file cannot have {wanted.size} bytes: send the file's true size."
        size = self._files.size(wanted.oid)
        if not self._is_upload and size is None:
            return 404, (
                f"The {self._repository.name} does not have this large file: push it from a clone "
                "that has it."
            )
        if size is not None and size != wanted.size:
            return 422, (
                f"The file with this sha256 has {size} bytes, and the request says {wanted.size}: "
                "send the file's true size."
            )
        limit = self._hub.settings.max_push_bytes
        if self._is_upload and wanted.size > limit:
            return 422, f"A file may have {limit} bytes at most: raise [hub] max_push_bytes."
        if self._is_upload and size is None and wanted.size > self._free_bytes:
            return 507, (
                f"The hub's disk has only {self._free_bytes} bytes left: make room there, then "
                "send the file again."
            )
        return None

    def _with_actions(self, told: Json, actions: Json) -> Json:
        # "authenticated" says that the client needs no token for these URLs. They are signed.
        return {**told, "authenticated": True, "actions": actions}

    def _signed(self, method: str, wanted: LargeObject) -> Json:
        path = transfers.object_path(self._repository, wanted.oid)
        signed = self._hub.signed_urls.sign(method, path, wanted.size)
        return {"href": f"{self._url}{signed}", "expires_in": signatures.LIFETIME_SECONDS}


def _json(content: Json, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse(
        content, status_code=status, headers=headers, media_type="application/vnd.git-lfs+json"
    )
