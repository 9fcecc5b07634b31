"""Sets and deletes the secrets and the variables of a Space, and stores the event of each change.
Afterwards the caller wakes the deliverer (`EventLog.wake`)."""

from collections.abc import Callable

from sqlalchemy.engine import Connection

from pipeline.hub.events.log import EventLog
from pipeline.hub.repositories.names import RepositoryName
from pipeline.hub.repositories.store import Repositories, Repository
from pipeline.hub.tokens.auth import Identity, check_sees


def change_settings(
    log: EventLog,
    repositories: Repositories,
    name: RepositoryName,
    identity: Identity,
    change: Callable[[Connection, Repository], None],
) -> Repository:
    """Calls `change`, and stores an event of the scope `repo.config`, as the Hugging Face Hub does.
    Raises RepositoryNotFound or TokenMissing if the token does not reach the Space."""
    with log.database.write() as connection:
        space = repositories.find(connection, name)
        check_sees(identity, name, space)
        change(connection, space)
        log.record(connection, space, action="update", scope="repo.config")
    return space
