"""The record `Hub`: the settings, database, repositories and so on that the routes need."""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial

from starlette.requests import Request

from pipeline.hub.database import Database
from pipeline.hub.errors import RepositoryNotFound
from pipeline.hub.events.log import EventLog
from pipeline.hub.large_files.signatures import AccessTokens, SignedUrls
from pipeline.hub.metrics import HubMetrics
from pipeline.hub.repositories.names import RepositoryName, RepositoryType
from pipeline.hub.repositories.refs import RefChange
from pipeline.hub.repositories.store import Repositories, Repository
from pipeline.hub.settings import HubSettings
from pipeline.hub.tokens.auth import Identity, check_sees, out_of_reach
from pipeline.hub.webhooks.job_copies import JobLauncher
from pipeline.hub.webhooks.store import SecretCipher

Remarks = Callable[[Repository, Mapping[str, str], Sequence[RefChange]], Sequence[str]]
"""Makes the lines that git prints after a push. The arguments are the repository, the
open pull requests (ref → the ref of the branch that it is for), and the changes of the refs."""


@dataclass(frozen=True, kw_only=True)
class Hub:
    settings: HubSettings
    database: Database
    repositories: Repositories
    log: EventLog
    cipher: SecretCipher
    launcher: JobLauncher | None
    metrics: HubMetrics
    signed_urls: SignedUrls
    xet_tokens: AccessTokens
    needed_commits: Callable[[], Collection[str]] | None = None
    """Returns the shas of the commits that releases and jobs need, in all repositories. If it is
    None, the hub does not know these commits, so it keeps every commit."""
    remarks_on: Callable[[Repository, Sequence[RefChange]], Sequence[str]] = lambda *_: ()
    """Makes the lines that git prints after a push with these changes."""
    commit_slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(2))
    """How many commits of the API may be parsed or made at once. A single line of a request's body
    may take 250 MB of memory while it is parsed."""
    anonymous_check: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))
    """Lets clients without a token check one README at a time. The metadata of a README may take
    four seconds to parse, and several at once would slow down every other request."""

    def find(self, name: RepositoryName) -> Repository:
        """Raises RepositoryNotFound."""
        with self.database.read() as connection:
            return self.repositories.find(connection, name)

    def is_there(self, name: RepositoryName) -> bool:
        try:
            return bool(self.find(name))
        except RepositoryNotFound:
            return False

    def find_as_git(self, type: RepositoryType, owner: str, name: str) -> Repository:
        """Raises RepositoryNotFound."""
        with self.database.read() as connection:
            return self.repositories.find_as_git(connection, type, owner, name)

    def find_by_id(self, id: str) -> Repository:
        """Raises RepositoryNotFound."""
        with self.database.read() as connection:
            return self.repositories.find_by_id(connection, id)

    def find_reached(self, name: RepositoryName, identity: Identity) -> Repository:
        """Like `find`. Also raises RepositoryNotFound or TokenMissing if the request's token does
        not reach the repository. The error then is the same as if the repository did not exist.

        `routes/access.py` has already checked this for the name in the path, but before the
        request's body came in. While it came in, the repository may have been deleted, and another
        repository may have got its name. So a route that has waited for a body checks again. A
        route whose body names another repository checks this one only here.
        """
        try:
            repository = self.find(name)
        except RepositoryNotFound:
            if identity.is_limited:
                raise out_of_reach(identity, name) from None
            raise
        check_sees(identity, name, repository)
        return repository

    def locked(
        self, name: RepositoryName, identity: Identity
    ) -> AbstractAsyncContextManager[Repository]:
        """A context manager that holds the repository's lock. Raises the errors of
        `find_reached`."""
        return self.repositories.locked(partial(self.find_reached, name, identity))


def hub_of(request: Request) -> Hub:
    hub: Hub = request.app.state.hub
    return hub
