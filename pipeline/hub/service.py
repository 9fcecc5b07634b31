"""What a hub is made of: its state folder, the record `Hub`, the identity of a client, which its
token shows, and the dependencies of the routes.

API clients send the token as Bearer; git sends it as the password of Basic, with any user name.

A route gets these dependencies as arguments. FastAPI runs them in their order, and each raises the
error that the client gets. A route gets its repository from `Readable` or `Locked`, or finds it
with `Repositories.find`, as both do.
"""

import asyncio
import base64
import binascii
import contextlib
import hashlib
import re
import secrets
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Annotated, Literal
from urllib.parse import unquote

from cryptography.fernet import Fernet, InvalidToken
from fastapi import Depends
from filelock import FileLock, Timeout
from sqlalchemy import select
from starlette.concurrency import run_in_threadpool
from starlette.convertors import Convertor, register_url_convertor
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from jobs.job import COMMITTER_DOMAIN, PREFIX, Job, job_of_token
from jobs.outcome import JobOutcome
from jobs.settings import JobsSettings
from jobs.store import JobStore
from pipeline.hub.database import Database, tokens
from pipeline.hub.deliveries import HubMetrics
from pipeline.hub.errors import Forbidden, HubError, RepositoryNotFound, Unauthorized
from pipeline.hub.events import EventLog
from pipeline.hub.git import Signature
from pipeline.hub.http_json import Json, chunks
from pipeline.hub.releases import Releases, refresh
from pipeline.hub.repositories import (
    REPOSITORY_TYPES,
    RefChange,
    Repositories,
    Repository,
    RepositoryName,
    RepositoryType,
    open_bases,
)
from pipeline.hub.settings import HubSettings
from serving.http.server import other_site

READING = frozenset({"GET", "HEAD", "OPTIONS"})
# The paths of repositories. As on the Hugging Face Hub, a client without a token is told there that
# the repository is missing.
_OF_A_REPOSITORY = re.compile(r"/api/(?:model|dataset|space)s/.|/.+/resolve/.")

Role = Literal["read", "write"]
NeededCommits = Callable[[], Collection[str]]
Remarks = Callable[[Repository, Mapping[str, str], Sequence[RefChange]], Sequence[str]]
"""Makes the lines that git prints after a push. The arguments are the repository, the open pull
requests (ref → the ref of the branch that it is for), and the changes of the refs."""


Take = Callable[[Job, JobOutcome, Callable[[str], Path]], JobOutcome]
"""The last argument makes a release of what the attempt has uploaded for a pipeline, and returns
its folder (`take_release`)."""


@dataclass(frozen=True, kw_only=True)
class Elsewhere:
    """What jobs on other machines need of this one (`routes/attempts.py`)."""

    settings: JobsSettings = field(default_factory=JobsSettings)
    variables_of: Callable[[Job], Mapping[str, str]] = lambda job: {}
    """Returns the variables that the current attempt of a job gets, such as its token."""
    take: Take = lambda job, outcome, upload: outcome
    """Has the release of a retraining served that was uploaded. Returns how the job has ended
    then."""


@contextlib.contextmanager
def only_hub_in(root: Path) -> Iterator[None]:
    """Makes the state folder if it does not exist, and holds its lock. Raises HubError if another
    process holds the lock."""
    # Only the owner may read the folder, because pushed data is private.
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = FileLock(root / "hub.lock")
    try:
        held = lock.acquire(timeout=0)
    except Timeout:
        raise HubError(
            f"Another hub uses {root}: stop that hub first, or choose another folder."
        ) from None
    with held:
        yield


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Who makes a request, and what the token of the request may do."""

    user: str
    """The name that `whoami` answers, and the author of commits that the API makes."""
    role: Role
    token_name: str
    """The name of the token, for messages and for `whoami`. It is not the token itself."""
    job_id: str | None = None
    """The job whose running attempt has the token; None for a person."""
    owns_hub: bool = False
    """Whether this is the hub's own token, which may do everything."""

    @property
    def signature(self) -> Signature:
        """The author of the commits and tags that this client makes through the API. If the token
        is a job's, the author is the job. The commits that the job makes with git have the same
        author."""
        if self.job_id is None:
            return Signature(name=self.user, email=f"{self.user}@localhost")
        return Signature(name=f"job {self.job_id}", email=f"{self.job_id}@{COMMITTER_DOMAIN}")

    def require_write(self, what: str) -> None:
        """Raises Forbidden if the token may only read. `what` names in the message what needs more,
        such as "a push"."""
        if self.role != "write":
            raise Forbidden(
                f"The token {self.token_name!r} may only read, and {what} needs the role write: "
                "use a token with this role."
            )

    def require_person(self, what: str) -> None:
        """Raises Forbidden for the token of a job. `what` names in the message what a job may not
        use."""
        if self.job_id is not None:
            raise Forbidden(
                f"This is the token of job {self.job_id}, which may read and write repositories "
                f"and nothing else: for {what}, use the token of a person."
            )


@dataclass(frozen=True, kw_only=True)
class Hub:
    settings: HubSettings
    database: Database
    repositories: Repositories
    log: EventLog
    metrics: HubMetrics
    token: str = field(repr=False)
    """The hub's own token."""
    jobs_store: JobStore
    jobs_dir: Path
    """Contains the folders of the jobs, with their logs."""
    elsewhere: Elsewhere
    secret_key: bytes = field(repr=False)
    """A Fernet key: encrypts secrets, and signs the tokens of jobs and the URLs of large files."""
    needed_commits: NeededCommits
    """Returns the shas of the commits that releases and jobs need, in all repositories."""
    remarks_on: Remarks
    releases: Releases
    git_slots: Mapping[str, asyncio.Semaphore]
    """One semaphore for each kind of git's work: `list` (of the refs), `clone`, `push` and `file`
    (one over the API). A clone or a file keeps its slot until its client has read the whole answer.
    The kinds have separate slots, so that no push or list waits for such a client. Every clone and
    every push begins with a list. Git makes the complete list before the hub sends it, so no slow
    client keeps the slot of a list."""
    commit_slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(2))
    """How many commits of the API may be parsed or made at once. A single line of a request's body
    may take 250 MB of memory while it is parsed."""
    card_slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))
    """How many READMEs may be checked at once. Anybody may send one, also without a token, and its
    metadata may take four seconds to parse. Several at once would slow down every other request."""
    followers: dict[str, dict[str, tuple[float, Json]]] = field(default_factory=dict)
    """Id of a model repository → name of a server that follows it → when it reported last
    (`time.monotonic`), and what. In memory only, because each reports again within a minute."""
    turns: dict[str, dict[str, float]] = field(default_factory=dict)
    """Id of a model repository → name of a follower that may swap now → when its turn ends
    (`time.monotonic`)."""

    def identify(self, token: bytes) -> Identity:
        """Who sends this token: it is the hub's own, or a person created it on this hub, or it is a
        job's. Each attempt of a job has its own token, which is valid while the attempt runs. All
        act for the hub's owner. Raises Unauthorized."""
        user = self.settings.owner
        if secrets.compare_digest(token, self.token.encode()):
            return Identity(user=user, role="write", token_name="hub", owns_hub=True)
        if token.startswith(PREFIX.encode()):
            text = token.decode("ascii", "replace")
            job = job_of_token(text, self.jobs_store, self.secret_key)
            if job is None:
                raise Unauthorized(
                    "This is not the token of a running attempt of a job: the attempt has ended, "
                    "or the token is wrong."
                )
            return Identity(user=user, role="write", token_name=f"job {job.id}", job_id=job.id)
        with self.database.read() as connection:
            same = select(tokens).where(tokens.c.digest == digest(token))
            row = connection.execute(same).one_or_none()
        if row is None:
            # `huggingface_hub` looks for exactly this text, and then does not report the repository
            # as missing.
            raise Unauthorized("Invalid credentials in Authorization header")
        return Identity(user=user, role=row.role, token_name=row.name)

    def remarks(self, repository: Repository, changes: Sequence[RefChange]) -> Sequence[str]:
        """The lines that git prints after a push with these changes."""
        return self.remarks_on(repository, open_bases(self.database, repository), changes)

    def name_of(self, type: RepositoryType, id: str) -> RepositoryName:
        """The name of the repository `id`, such as `owner/name`. Without an owner, it is one of the
        hub's owner."""
        owner, _, name = id.rpartition("/")
        return RepositoryName(type=type, owner=owner or self.settings.owner, name=name)

    def locked(self, name: RepositoryName) -> AbstractAsyncContextManager[Repository]:
        """The repository, under its lock within the block."""
        return self.repositories.locked(partial(self.repositories.find, name))


async def hub_of(request: Request) -> Hub:
    hub: Hub = request.app.state.hub
    return hub


HubOf = Annotated[Hub, Depends(hub_of)]

TYPES: dict[str, RepositoryType] = {f"{type}s": type for type in REPOSITORY_TYPES}


def by_encoded_path(api: ASGIApp) -> ASGIApp:
    """The routes match the encoded path and decode its parts, because a part may have an encoded
    slash, as in `refs%2Fpr%2F1`."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope = {**scope, "path": scope["raw_path"].decode("latin-1")}
        await api(scope, receive, send)

    return app


class _Encoded(Convertor[str]):
    """Decodes a part of the encoded path, so an encoded slash (`%2F`) does not end the part."""

    def convert(self, value: str) -> str:
        return unquote(value)


for _name, _regex in {
    "part": "[^/]+",
    "rest": ".*",
    "typed_repository": f"(?:{'|'.join(TYPES)})/(?:[^/]+/)?[^/]+",
    "repository": f"(?:(?:{'|'.join(TYPES)})/)?(?:[^/]+/)?[^/]+",
}.items():
    register_url_convertor(_name, type(_name, (_Encoded,), {"regex": _regex})())

API = "/api/{repository:typed_repository}"
FILES = "/{repository:repository}"


def grant(key: bytes, *facts: str) -> str:
    """A text that a client sends instead of a token. It allows what the facts say, such as a
    method, a path and a size. Only the hub can make and read it."""
    return Fernet(key).encrypt(" ".join(facts).encode()).decode()


def granted(key: bytes, text: str, seconds: int) -> str:
    """The facts of a text that `grant` made, with a space between two of them. Empty if it is older
    than `seconds`, or if the hub did not make it."""
    with contextlib.suppress(InvalidToken):
        return Fernet(key).decrypt(text.encode(), ttl=seconds).decode()
    return ""


def digest(token: bytes) -> str:
    """What the hub stores of a token. A slower hash is not needed, because a token has 160 random
    bits, and nobody can find it by trying."""
    return hashlib.sha256(token).hexdigest()


def sent_token(scope: Scope) -> bytes:
    """The token that the request sends; empty if it is sent wrongly. Raises Unauthorized if there
    is none."""
    given: list[bytes] = [value for name, value in scope["headers"] if name == b"authorization"]
    if not given:
        missing = Unauthorized(
            "This hub needs a token: set HF_TOKEN, or run the commands that `pipeline env` prints. "
            "In a browser, `pipeline open` signs you in."
        )
        if _OF_A_REPOSITORY.match(scope["path"]):
            missing.code = RepositoryNotFound.code
        raise missing
    scheme, _, credentials = given[0].partition(b" ")
    if len(given) == 1 and scheme.lower() == b"bearer":
        return credentials.strip()
    if len(given) == 1 and scheme.lower() == b"basic":
        with contextlib.suppress(binascii.Error):
            return base64.b64decode(credentials.strip(), validate=True).partition(b":")[2]
    return b""


def check_site(scope: Scope) -> None:
    """Raises Forbidden if a browser sends this change for a page of another site.

    A browser that has stored the token also adds it to requests that such a page causes.
    """
    site = None if scope["method"] in READING else other_site(Headers(scope=scope))
    if site is not None:
        raise Forbidden(
            f"The browser sends this request on behalf of {site}, and only this hub's own pages "
            "may change anything: use `pipeline`, `hf` or another client with the hub's token."
        )


def identified(request: Request, hub: HubOf) -> Identity:
    """Who makes the request. Raises Unauthorized, and Forbidden for a page of another site."""
    identity = hub.identify(sent_token(request.scope))
    check_site(request.scope)
    return identity


Who = Annotated[Identity, Depends(identified)]


async def person(request: Request, identity: Who) -> Identity:
    """For routes that a job may not use: a job may only read and write repositories."""
    if request.method not in READING:
        identity.require_write(f"{request.method} {request.url.path}")
    identity.require_person(request.url.path)
    return identity


async def hubs_own(request: Request, identity: Who) -> None:
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


async def readable(hub: HubOf, _: Who, name: Named) -> Repository:
    await refresh(hub.releases, name)
    return await run_in_threadpool(hub.repositories.find, name)


Readable = Annotated[Repository, Depends(readable)]


async def locked(hub: HubOf, _: Writer, name: Named) -> AsyncIterator[Repository]:
    """The repository, under its lock until the route has made its change.

    Declare it after the body: while a body comes in, no lock is held, and the repository may be
    deleted or replaced.
    """
    await refresh(hub.releases, name)
    async with hub.locked(name) as repository:
        yield repository


Locked = Annotated[Repository, Depends(locked, scope="function")]


async def received(request: Request, hub: HubOf) -> AsyncIterator[IO[bytes]]:
    """The request's complete body in a file, so it is never in memory as a whole. Declare it after
    the checks of the token and the repository."""
    with TemporaryFile(dir=hub.repositories.incoming) as file:
        async for chunk in chunks(request, max_bytes=hub.settings.max_push_bytes):
            await run_in_threadpool(file.write, chunk)
        # This also writes what is left in the buffer: git reads the file.
        await run_in_threadpool(file.seek, 0)
        yield file


Received = Annotated[IO[bytes], Depends(received)]
