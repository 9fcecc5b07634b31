"""The record `Hub`: the settings, database, repositories and so on that the routes need."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

from fastapi import Depends
from starlette.requests import Request

from pipeline.hub.cipher import Cipher
from pipeline.hub.database import Database
from pipeline.hub.deliveries import JobLauncher
from pipeline.hub.discussions import open_bases
from pipeline.hub.errors import RepositoryNotFound
from pipeline.hub.events import EventLog
from pipeline.hub.garbage import NeededCommits
from pipeline.hub.metrics import HubMetrics
from pipeline.hub.repositories import (
    RefChange,
    Repositories,
    Repository,
    RepositoryName,
    RepositoryType,
)
from pipeline.hub.settings import HubSettings
from pipeline.hub.tokens import Guard, Identity

Remarks = Callable[[Repository, Mapping[str, str], Sequence[RefChange]], Sequence[str]]
"""Makes the lines that git prints after a push. The arguments are the repository, the open pull
requests (ref → the ref of the branch that it is for), and the changes of the refs."""


@dataclass(frozen=True, kw_only=True)
class Hub:
    settings: HubSettings
    database: Database
    repositories: Repositories
    log: EventLog
    cipher: Cipher
    launcher: JobLauncher
    metrics: HubMetrics
    guard: Guard
    needed_commits: NeededCommits | None
    """Returns the shas of the commits that releases and jobs need, in all repositories. If it is
    None, the hub does not know these commits, so it keeps every commit."""
    remarks_on: Remarks
    git_slots: Mapping[str, asyncio.Semaphore]
    """One for each process of git. A clone keeps its slot until its client has read the whole
    answer. Pushes have separate slots, so that no push waits for such a client. Every clone and
    every push begins with a list of the refs. Git makes the complete list before the hub sends it,
    so no slow client keeps the slot of a list."""
    commit_slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(2))
    """How many commits of the API may be parsed or made at once. A single line of a request's body
    may take 250 MB of memory while it is parsed."""
    card_slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))
    """How many READMEs may be checked at once. Anybody may send one, also without a token, and its
    metadata may take four seconds to parse. Several at once would slow down every other request."""

    def remarks(self, repository: Repository, changes: Sequence[RefChange]) -> Sequence[str]:
        """The lines that git prints after a push with these changes."""
        with self.database.read() as connection:
            bases = open_bases(connection, repository)
        return self.remarks_on(repository, bases, changes)

    def name_of(self, type: RepositoryType, id: str) -> RepositoryName:
        """The name of the repository `id`, such as `owner/name`. Without an owner, it is one of the
        hub's owner."""
        owner, _, name = id.rpartition("/")
        return RepositoryName(type=type, owner=owner or self.settings.owner, name=name)

    def find_by_id(self, id: str) -> Repository:
        """Raises RepositoryNotFound."""
        with self.database.read() as connection:
            return self.repositories.find_by_id(connection, id)

    def find_reached(self, name: RepositoryName, identity: Identity) -> Repository:
        """Raises RepositoryNotFound or TokenMissing if the repository does not exist or if the
        token does not reach it. With a limited token, both get the same error."""
        try:
            with self.database.read() as connection:
                repository = self.repositories.find(connection, name)
        except RepositoryNotFound:
            if identity.is_limited:
                raise identity.out_of_reach(name) from None
            raise
        if not identity.may_see(repository):
            raise identity.out_of_reach(name)
        return repository

    def locked(
        self, name: RepositoryName, identity: Identity
    ) -> AbstractAsyncContextManager[Repository]:
        """As `find_reached`, and holds the repository's lock within the block."""
        return self.repositories.locked(partial(self.find_reached, name, identity))


async def hub_of(request: Request) -> Hub:
    hub: Hub = request.app.state.hub
    return hub


HubOf = Annotated[Hub, Depends(hub_of)]
