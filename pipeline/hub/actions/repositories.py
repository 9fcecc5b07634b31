"""Creates, deletes and moves repositories for clients of the API, changes their visibility, and
stores the event of each change.

Except for `create`, the caller holds the repository's lock.
"""

from pipeline.hub.commits import first_commit
from pipeline.hub.events import Event, EventLog
from pipeline.hub.repositories import Repositories, Repository, RepositoryName, remember
from pipeline.hub.tokens import Signature


def create(
    log: EventLog,
    repositories: Repositories,
    name: RepositoryName,
    *,
    private: bool,
    author: Signature | None,
) -> Repository:
    """The repository begins with a commit of `author`, or without a commit if `author` is None.
    Raises Conflict if the name is taken."""
    # Git works before the transaction, because no push can be stored during it.
    with repositories.prepared(name, private=private) as prepared:
        first = [] if author is None else [first_commit(prepared, author)]
        with log.database.write() as connection:
            repository = repositories.add(connection, prepared)
            if first:
                remember(connection, repository, first)
            log.record(connection, repository, Event(action="create"))
    return repository


def delete(log: EventLog, repositories: Repositories, repository: Repository) -> None:
    with repositories.removal(repository), log.database.write() as connection:
        log.record(connection, repository, Event(action="delete"))
        repositories.forget(connection, repository)


def move(
    log: EventLog, repositories: Repositories, repository: Repository, to: RepositoryName
) -> None:
    """Raises Conflict if the name `to` is taken."""
    with log.database.write() as connection:
        repositories.rename(connection, repository, to)
        log.record(connection, repository, Event(action="move", moved_to=to))


def set_private(
    log: EventLog, repositories: Repositories, repository: Repository, private: bool
) -> None:
    with log.database.write() as connection:
        repositories.set_private(connection, repository, private)
        changed = repositories.find_by_id(connection, repository.id)
        log.record(connection, changed, Event(action="update", scope="repo.config"))
