"""What every route of the hub is given."""

import asyncio
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial

from starlette.requests import Request

from pipeline.hub.auth import Identity, check_sees
from pipeline.hub.database import Database
from pipeline.hub.errors import RepositoryMoved, RepositoryNotFound
from pipeline.hub.events import EventLog
from pipeline.hub.job_copies import JobLauncher
from pipeline.hub.metrics import HubMetrics
from pipeline.hub.names import RepositoryName, RepositoryType
from pipeline.hub.payloads import RefChange
from pipeline.hub.repositories import Repositories, Repository
from pipeline.hub.settings import HubSettings
from pipeline.hub.signatures import AccessTokens, SignedUrls
from pipeline.hub.webhook_store import SecretCipher

Remarks = Callable[[Repository, Sequence[RefChange]], Sequence[str]]


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
    """What releases and jobs need of any repository; None if that is not known."""
    remarks_on: Remarks = lambda repository, changes: ()
    """What to tell the person who moved these refs, one line each."""
    commit_slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(2))
    """For those who read the body of a commit: a line of it may take 250 MB while it is read."""

    def find(self, name: RepositoryName) -> Repository:
        """Raises RepositoryNotFound."""
        with self.database.read() as connection:
            return self.repositories.find(connection, name)

    def is_there(self, name: RepositoryName) -> bool:
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
        """As `find`. Raises RepositoryNotFound for a repository that the token does not reach, too.

        Needed after a body has come in: meanwhile the repository that was checked may have been
        deleted, and another repository may have its name.
        """
        repository = self.find(name)
        check_sees(identity, name, repository)
        return repository

    def locked(
        self, name: RepositoryName, identity: Identity
    ) -> AbstractAsyncContextManager[Repository]:
        """The repository, its lock held. Raises what `find_reached` raises."""
        return self.repositories.locked(partial(self.find_reached, name, identity))


def hub_of(request: Request) -> Hub:
    hub: Hub = request.app.state.hub
    return hub
