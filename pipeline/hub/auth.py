"""Who may come in: by a token, over Bearer (API clients) or Basic with any user name (git)."""

import asyncio
import base64
import binascii
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.types import Scope

from jobs.attempt_tokens import PREFIX, job_of_token
from jobs.environment import COMMITTER_DOMAIN
from jobs.store import JobStore
from pipeline.hub.errors import Forbidden, RepositoryNotFound, TokenMissing, Unauthorized
from pipeline.hub.repositories import Repository
from receiver.cross_site import other_host, other_site

READING = frozenset({"GET", "HEAD", "OPTIONS"})
OF_ITS_BODY_ONLY = "/api/validate-yaml"
"""Its answer depends on the request's body and on nothing that is here. `metadata_update` and
`DatasetCard.push_to_hub` ask it without their token."""
# As the client's own expression tells paths of repositories from others.
_OF_A_REPOSITORY = re.compile(r"/api/(?:model|dataset|space)s/.|/.+/resolve/.")

Role = Literal["read", "write"]


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Who makes a request, and how far the token of the request reaches."""

    user: str
    """The name that `whoami` answers, and the author of commits that the API makes."""
    role: Role
    token_name: str
    """The name of the token, for messages and for `whoami`. It is not the token itself."""
    job_id: str | None = None
    """The job whose running attempt has the token; None for a person."""
    repositories: frozenset[str] | None = None
    """The ids of the only repositories that the token reaches; None for all repositories."""
    owns_hub: bool = False
    """Whether this is the hub's own token, which may do everything."""

    @property
    def is_anonymous(self) -> bool:
        """Whether the request has no token: it sees what is public."""
        return not self.user

    @property
    def is_limited(self) -> bool:
        """Whether there may be repositories that the request does not reach."""
        return self.is_anonymous or self.repositories is not None

    def may_see(self, repository: Repository) -> bool:
        if self.is_anonymous:
            return not repository.private
        return self.repositories is None or repository.id in self.repositories

    def require_write(self, what: str) -> None:
        """Raises Forbidden if the token may only read, and Unauthorized if there is none. `what`
        names the change, for the message."""
        if self.is_anonymous:
            raise Unauthorized(f"{what} needs a token: set HF_TOKEN, or run `pipeline env`.")
        if self.role != "write":
            raise Forbidden(
                f"The token {self.token_name!r} may only read, and {what} is a change: use a token "
                "with the role write."
            )


@dataclass(frozen=True, kw_only=True)
class Signature:
    """The author and the committer of a commit."""

    name: str
    email: str


def signature(identity: Identity) -> Signature:
    """Of what this client commits. As with git, a commit of a job names the job."""
    if identity.job_id is None:
        return Signature(name=identity.user, email=f"{identity.user}@localhost")
    return Signature(name=f"job {identity.job_id}", email=f"{identity.job_id}@{COMMITTER_DOMAIN}")


def check_sees(identity: Identity, named: object, repository: Repository) -> None:
    """Raises the same for what the token does not reach as for what is not there."""
    if not identity.may_see(repository):
        raise out_of_reach(identity, named)


def out_of_reach(identity: Identity, named: object) -> RepositoryNotFound | TokenMissing:
    if identity.is_anonymous:
        return TokenMissing(f"No {named} here that may be read without a token: set HF_TOKEN.")
    return RepositoryNotFound(
        f"No {named} here, or the token {identity.token_name!r} does not reach it."
    )


ANONYMOUS = Identity(user="", role="read", token_name="")


def require_a_person(identity: Identity, what: str) -> None:
    """Raises Forbidden for the token of a job. `what` is what only a person may change."""
    if identity.job_id is not None:
        raise Forbidden(
            f"This is the token of job {identity.job_id}, which may read and write repositories "
            f"and nothing else: {what} need another token."
        )


def identity_of(connection: HTTPConnection) -> Identity:
    """Who makes this request, as `Guard.check` found out."""
    identity: Identity = connection.scope["state"]["identity"]
    return identity


class Guard:
    """Lets in who has the hub's token, and a job's running attempt, which has a token of its own.

    `owner` is the user whom the hub's token belongs to; jobs act for the same user. Without
    `jobs_store` there are no jobs to let in. `secret_key` signs their tokens. `find_token` finds
    the tokens that were created later. With `public_host`, the hub's own name, requests without a
    token are let in too; what they may read is decided elsewhere.
    """

    def __init__(
        self,
        token: str,
        owner: str,
        jobs_store: JobStore | None,
        secret_key: bytes,
        *,
        find_token: Callable[[bytes], Identity | None] = lambda token: None,
        public_host: str | None = None,
    ) -> None:
        self._token = token.encode()
        self._owner = Identity(user=owner, role="write", token_name="hub", owns_hub=True)
        self._find_token = find_token
        self._public_host = public_host
        self._jobs_store = jobs_store
        self._secret_key = secret_key

    async def check(self, scope: Scope) -> Identity:
        """Who makes the request; `identity_of` tells it to the routes.

        Raises Unauthorized for a request without a token that is good now.
        """
        identity = await self._identify(scope)
        scope.setdefault("state", {})["identity"] = identity
        return identity

    async def _identify(self, scope: Scope) -> Identity:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if not given:
            return self._without_token(scope)
        token = _token(given[0])
        if len(given) == 1 and secrets.compare_digest(token, self._token):
            return self._owner
        if len(given) == 1 and self._jobs_store is not None and token.startswith(PREFIX.encode()):
            job = await asyncio.to_thread(
                job_of_token, token.decode("ascii", "replace"), self._jobs_store, self._secret_key
            )
            if job is not None:
                return replace(
                    self._owner, token_name=f"job {job.id}", job_id=job.id, owns_hub=False
                )
            raise Unauthorized("This token belongs to an attempt of a job that has ended.")
        if len(given) == 1 and token:
            stored = await asyncio.to_thread(self._find_token, token)
            if stored is not None:
                return stored
        raise Unauthorized("Invalid credentials in Authorization header")

    def _without_token(self, scope: Scope) -> Identity:
        """Raises TokenMissing or Unauthorized, and Forbidden for a page that reads this hub under a
        name of its own (DNS rebinding)."""
        if scope["path"] == OF_ITS_BODY_ONLY:
            return ANONYMOUS
        if self._public_host is not None:
            host = other_host(Headers(scope=scope), scope.get("server"), {self._public_host})
            if host is None:
                return ANONYMOUS
            raise Forbidden(
                f"The request calls this hub {host!r}, which is not its name. Without a token, use "
                "the address that the hub prints when it starts."
            )
        error = TokenMissing if _OF_A_REPOSITORY.match(scope["path"]) else Unauthorized
        raise error(
            "This hub needs a token: set HF_TOKEN, or run `pipeline env` for the whole environment."
        )


def check_site(scope: Scope) -> None:
    """Raises Forbidden for a change that a page of another site asks for.

    A browser that knows the token adds it to such requests too.
    """
    site = None if scope["method"] in READING else other_site(Headers(scope=scope))
    if site is not None:
        raise Forbidden(
            f"The browser sends this for {site}, and only this hub's own pages may change "
            "anything: use `pipeline`, `hf` or another client with the hub's token."
        )


def _token(value: bytes) -> bytes:
    scheme, _, credentials = value.partition(b" ")
    if scheme.lower() == b"bearer":
        return credentials.strip()
    if scheme.lower() == b"basic":
        try:
            return base64.b64decode(credentials.strip(), validate=True).partition(b":")[2]
        except binascii.Error:
            return b""
    return b""
