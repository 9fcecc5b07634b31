"""Finds out who makes a request, from its token. API clients send the token as Bearer; git sends it
as the password of Basic, with any user name."""

import asyncio
import base64
import binascii
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from starlette.datastructures import Headers
from starlette.types import Scope

from jobs.attempt_tokens import PREFIX, job_of_token
from jobs.environment import COMMITTER_DOMAIN
from jobs.store import JobStore
from pipeline.hub.errors import Forbidden, RepositoryNotFound, TokenMissing, Unauthorized
from pipeline.hub.repositories.store import Repository
from serving.http.cross_site import other_host, other_site

READING = frozenset({"GET", "HEAD", "OPTIONS"})
OF_ITS_BODY_ONLY = "/api/validate-yaml"
"""This route needs no token, because its answer depends only on the request's body. Also,
`metadata_update` and `DatasetCard.push_to_hub` of `huggingface_hub` call it without a token."""
# The paths of repositories. `huggingface_hub` has the same expression. If a request to one of these
# paths gets a 401, the client reports that the repository is missing.
_OF_A_REPOSITORY = re.compile(r"/api/(?:model|dataset|space)s/.|/.+/resolve/.")

Role = Literal["read", "write"]


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Who makes a request, and what the token of the request may do."""

    user: str
    """The name that `whoami` answers, and the author of commits that the API makes. Empty for a
    request without a token."""
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
        """Whether the request has no token. It then sees only public repositories."""
        return not self.user

    @property
    def is_limited(self) -> bool:
        """Whether there may be repositories that the request may not see."""
        return self.is_anonymous or self.repositories is not None

    def may_see(self, repository: Repository) -> bool:
        if self.is_anonymous:
            return not repository.private
        return self.repositories is None or repository.id in self.repositories

    def require_write(self, what: str) -> None:
        """Raises Forbidden if the token may only read, and Unauthorized if there is no token.
        `what` names in the message what needs the role, such as "a push"."""
        if self.is_anonymous:
            raise Unauthorized(f"{what} needs a token: set HF_TOKEN, or run `pipeline env`.")
        if self.role != "write":
            raise Forbidden(
                f"The token {self.token_name!r} may only read, and {what} needs the role write: "
                "use a token with this role."
            )


@dataclass(frozen=True, kw_only=True)
class Signature:
    """The author and the committer of a commit."""

    name: str
    email: str

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables from which git takes the author, the committer and the
        tagger."""
        return {
            f"GIT_{role}_{fact}": value
            for role in ("AUTHOR", "COMMITTER")
            for fact, value in (("NAME", self.name), ("EMAIL", self.email))
        }


def signature(identity: Identity) -> Signature:
    """The author of the commits and tags that this client makes through the API. If the token is a
    job's, the author is the job. The commits that the job makes with git have the same author."""
    if identity.job_id is None:
        return Signature(name=identity.user, email=f"{identity.user}@localhost")
    return Signature(name=f"job {identity.job_id}", email=f"{identity.job_id}@{COMMITTER_DOMAIN}")


def check_sees(identity: Identity, named: object, repository: Repository) -> None:
    """Raises the error of `out_of_reach` if the token does not reach `repository`. `named` is the
    name in the request, for the message."""
    if not identity.may_see(repository):
        raise out_of_reach(identity, named)


def out_of_reach(identity: Identity, named: object) -> RepositoryNotFound | TokenMissing:
    """The error for a repository that the token does not reach. A repository that does not exist
    gets the same error, so that no client learns which repositories exist."""
    if identity.is_anonymous:
        return TokenMissing(
            f"Without a token, you cannot read a {named} here: check the name, or set HF_TOKEN."
        )
    return RepositoryNotFound(
        f"There is no {named} here, or the token {identity.token_name!r} does not reach it: check "
        "the name, or use another token."
    )


ANONYMOUS = Identity(user="", role="read", token_name="")


def require_a_person(identity: Identity, what: str) -> None:
    """Raises Forbidden for the token of a job. `what`, a plural for the message, says what a job
    may not use."""
    if identity.job_id is not None:
        raise Forbidden(
            f"This is the token of job {identity.job_id}, which may read and write repositories "
            f"and nothing else: {what} need the token of a person."
        )


class Guard:
    """Accepts three kinds of tokens: the hub's own token, the tokens that a person created on this
    hub, and the tokens of jobs.

    Each attempt of a job has its own token, which is valid while the attempt runs. `owner` is the
    user to whom the hub's own token belongs; jobs act for the same user. If `jobs_store` is None,
    no job's token is valid. `secret_key` signs the jobs' tokens. `find_token` returns the identity
    for a token that a person created, and None for any other text. `public_host` is the hub's host
    name, if the hub accepts requests without a token. `routes/access.py` decides what such requests
    may read.
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
        """Who makes the request.

        Raises Unauthorized if the request has no valid token and needs one. Raises Forbidden for a
        host name that is not the hub's (see `_without_token`).
        """
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
            raise Unauthorized(
                "This is not the token of a running attempt of a job: the attempt has ended, or "
                "the token is wrong."
            )
        if len(given) == 1 and token:
            stored = await asyncio.to_thread(self._find_token, token)
            if stored is not None:
                return stored
        # `huggingface_hub` looks for exactly this text, and then does not report the repository as
        # missing.
        raise Unauthorized("Invalid credentials in Authorization header")

    def _without_token(self, scope: Scope) -> Identity:
        """The identity of a request without a token. Raises TokenMissing or Unauthorized if the
        path needs a token.

        Raises Forbidden if the `Host` header has a name that is not the hub's. Without this check,
        a web page whose host name leads to this machine (DNS rebinding) could read the hub.
        """
        if scope["path"] == OF_ITS_BODY_ONLY:
            return ANONYMOUS
        if self._public_host is not None:
            host = other_host(Headers(scope=scope), scope.get("server"), {self._public_host})
            if host is None:
                return ANONYMOUS
            raise Forbidden(
                f"The request is for the host {host!r}, which is not the name of this hub: use the "
                "address that the hub prints when it starts, or set HF_TOKEN."
            )
        error = TokenMissing if _OF_A_REPOSITORY.match(scope["path"]) else Unauthorized
        raise error(
            "This hub needs a token: set HF_TOKEN, or run the commands that `pipeline env` prints."
        )


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
