"""Finds out who makes a request, from its token; creates, lists and revokes tokens.

API clients send the token as Bearer; git sends it as the password of Basic, with any user name. The
routes use this module, and the command line while no hub runs. A token that a person created may
only read, or read and write, and is valid for all repositories or only for some.
"""

import base64
import binascii
import contextlib
import hashlib
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from sqlalchemy import delete, insert, select
from starlette.datastructures import Headers
from starlette.types import Scope

from jobs.job import COMMITTER_DOMAIN, job_of_token
from jobs.store import JobStore
from pipeline.hub.database import Database
from pipeline.hub.database import tokens as table
from pipeline.hub.errors import (
    BadRequest,
    Conflict,
    Forbidden,
    NotFound,
    RepositoryNotFound,
    Unauthorized,
)
from pipeline.hub.http_json import Json, iso_time
from pipeline.hub.repositories import Repositories, Repository, RepositoryName, repository_name
from serving.http.server import other_site

READING = frozenset({"GET", "HEAD", "OPTIONS"})
# The paths of repositories. As on the Hugging Face Hub, a client without a token is told there that
# the repository is missing.
_OF_A_REPOSITORY = re.compile(r"/api/(?:model|dataset|space)s/.|/.+/resolve/.")

Role = Literal["read", "write"]


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
    repositories: frozenset[str] | None = None
    """The ids of the only repositories that the token reaches; None for all repositories."""
    owns_hub: bool = False
    """Whether this is the hub's own token, which may do everything."""

    def may_see(self, repository: Repository) -> bool:
        return self.repositories is None or repository.id in self.repositories

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

    def out_of_reach(self, named: object) -> RepositoryNotFound:
        """The error for a repository that the token does not reach. A repository that does not
        exist gets the same error, so that no client learns which repositories exist. `named` is
        the name in the request."""
        return RepositoryNotFound(
            f"There is no {named} here, or the token {self.token_name!r} does not reach it: check "
            "the name, or use another token."
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


def sent_token(scope: Scope) -> bytes:
    """The token that the request sends; empty if it is sent wrongly. Raises Unauthorized if there
    is none."""
    given: list[bytes] = [value for name, value in scope["headers"] if name == b"authorization"]
    if not given:
        missing = Unauthorized(
            "This hub needs a token: set HF_TOKEN, or run the commands that `pipeline env` prints."
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


def identity_of_stored(database: Database, token: bytes, user: str) -> Identity:
    """The identity of a token that a person created. Raises Unauthorized."""
    with database.read() as connection:
        found = connection.execute(select(table).where(table.c.digest == digest(token)))
        row = found.one_or_none()
    if row is None:
        # `huggingface_hub` looks for exactly this text, and then does not report the repository as
        # missing.
        raise Unauthorized("Invalid credentials in Authorization header")
    return Identity(
        user=user,
        role=row.role,
        token_name=row.name,
        repositories=None if row.repositories is None else frozenset(row.repositories),
    )


def identity_of_job(jobs_store: JobStore, secret_key: bytes, token: str, user: str) -> Identity:
    """The identity of a running attempt of a job. Raises Unauthorized."""
    job = job_of_token(token, jobs_store, secret_key)
    if job is None:
        raise Unauthorized(
            "This is not the token of a running attempt of a job: the attempt has ended, or the "
            "token is wrong."
        )
    return Identity(user=user, role="write", token_name=f"job {job.id}", job_id=job.id)


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


def digest(token: bytes) -> str:
    """What the hub stores of a token. A slower hash is not needed, because a token has 160 random
    bits, and nobody can find it by trying."""
    return hashlib.sha256(token).hexdigest()


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")


def check_name(name: str) -> None:
    """Raises BadRequest if a token cannot have this name."""
    if not _NAME.fullmatch(name):
        raise BadRequest(
            f"{name!r} is not a valid name for a token: use 1 to 96 letters, digits, '-', '_' and "
            "'.', beginning with a letter or a digit."
        )


def create_token(
    database: Database,
    repositories: Repositories,
    name: str,
    role: str,
    reaches: Sequence[str],
) -> Json:
    """Creates a token. `reaches` are the only repositories for which it is valid, such as
    `dataset:local/facts`; if it is empty, the token is for all repositories. Only this answer
    shows the token."""
    if role not in get_args(Role):
        raise BadRequest(f"{role!r} is not a role: choose read or write.")
    check_name(name)
    token = f"hf_{secrets.token_hex(20)}"
    with database.write() as connection:
        ids = [repositories.find(connection, _named(item)).id for item in reaches]
        if connection.execute(select(table.c.name).where(table.c.name == name)).first() is not None:
            raise Conflict(
                f"There is a token {name!r} already: revoke it first, or choose another name."
            )
        connection.execute(
            insert(table).values(
                name=name,
                digest=digest(token.encode()),
                role=role,
                repositories=ids or None,
                created_at=time.time(),
            )
        )
    return {"name": name, "role": role, "token": token}


def _named(item: str) -> RepositoryName:
    type, _, id = item.partition(":")
    owner, slash, short = id.partition("/")
    if not slash:
        raise BadRequest(
            f"{item!r} does not name a repository: write its type, owner and name, such as "
            "dataset:owner/name."
        )
    return repository_name(type, owner, short)


def list_tokens(database: Database, repositories: Repositories) -> list[Json]:
    with database.read() as connection:
        names = {
            each.id: f"{each.name.type}:{each.name.id}" for each in repositories.all(connection)
        }
        return [
            {
                "name": row.name,
                "role": row.role,
                "repositories": row.repositories
                and [names.get(id, "(deleted)") for id in row.repositories],
                "createdAt": iso_time(row.created_at),
            }
            for row in connection.execute(select(table).order_by(table.c.created_at))
        ]


def revoke_token(database: Database, name: str) -> Json:
    """Deletes a token, so that the next request with it is refused. Raises NotFound."""
    with database.write() as connection:
        if connection.execute(delete(table).where(table.c.name == name)).rowcount == 0:
            raise NotFound(
                f"There is no token {name!r} here: list the tokens with `pipeline hub tokens ls`."
            )
    return {"revoked": name}
