"""The record `Hub`: the settings, database, repositories and so on that the routes need."""

import asyncio
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial

from starlette.requests import Request

from pipeline.hub.database import Database
from pipeline.hub.errors import RepositoryMoved, RepositoryNotFound
from pipeline.hub.events.log import EventLog
from pipeline.hub.large_files.signatures import AccessTokens, SignedUrls
from pipeline.hub.metrics import HubMetrics
from pipeline.hub.repositories.names import RepositoryName, RepositoryType
from pipeline.hub.repositories.refs import RefChange
from pipeline.hub.repositories.store import Repositories, Repository
from pipeline.hub.settings import HubSettings
from pipeline.hub.tokens.auth import Identity, check_sees
from pipeline.hub.webhooks.job_copies import JobLauncher
from pipeline.hub.webhooks.store import SecretCipher

Remarks = Callable[[Repository, Sequence[str], Sequence[RefChange]], Sequence[str]]
"""Makes the lines to show to the person who pushed. Its arguments are the repository, the former
names (`owner/name`, in lower case) that still lead to it, and the changes of its refs."""


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
    """Returns the shas of the commits that releases and jobs need, in all repositories. None if
    nobody knows them; the hub then keeps every commit."""
    remarks_on: Callable[[Repository, Sequence[RefChange]], Sequence[str]] = lambda *_: ()
    """Makes the lines to show to the person who pushed these changes."""
    commit_slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(2))
    """How many bodies of commits may be parsed at once. A single line of a body may take 250 MB of
    memory while it is parsed."""

    def find(self, name: RepositoryName) -> Repository:
        """Raises RepositoryNotFound."""
        with self.database.read() as connection:
            return self.repositories.find(connection, name)

    def is_there(self, name: RepositoryName) -> bool:
        """Whether a repository has this name or had it before it was moved."""
        try:
            return bool(self.find(name))
        except RepositoryNotFound as error:
            return isinstance(error, RepositoryMoved)

    def find_as_git(self, type: RepositoryType, owner: str, name: str) -> Repository:
        """Raises RepositoryNotFound."""
        with self.database.read() as connection:
            return self.repositories.find_as_git(connection, type, owner, name)

    def find_by_id(self, id: str) -> Repository:
        """Raises RepositoryNotFound."""
        with self.database.read() as connection:
            return self.repositories.find_by_id(connection, id)

    def find_reached(self, name: RepositoryName, identity: Identity) -> Repository:
        """The repository, as `find`. Also raises RepositoryNotFound if the token does not reach it.

        A route needs this after a body has come in: `routes/access.py` checked before. Meanwhile
        the repository may have been deleted, and another repository may have its name.
        """
        repository = self.find(name)
        check_sees(identity, name, repository)
        return repository

    def locked(
        self, name: RepositoryName, identity: Identity
    ) -> AbstractAsyncContextManager[Repository]:
        """A context manager that holds the repository's lock. Raises what `find_reached` raises."""
        return self.repositories.locked(partial(self.find_reached, name, identity))


def hub_of(request: Request) -> Hub:
    hub: Hub = request.app.state.hub
    return hub
