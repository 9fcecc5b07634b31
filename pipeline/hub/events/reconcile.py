"""Compares the repositories on disk with the database, and stores the events that are missing.
Events are missing if the hub was killed, or if a person changed a repository's folder.
"""

import logging
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from pipeline.hub.errors import HubError
from pipeline.hub.events.log import EventLog, record_ref_changes
from pipeline.hub.events.payloads import Event
from pipeline.hub.repositories.store import Repositories, Repository

logger = logging.getLogger(__name__)

_NUM_THREADS = 8


def reconcile_at_start(repositories: Repositories, log: EventLog) -> None:
    """Finishes the moves that a kill interrupted. Then adds a row to the database for each new
    folder, and deletes the rows of missing folders. Stores events for the changes of refs that have
    none.

    It takes no locks, so it must end before the hub answers its first request.
    """
    repositories.remove_incomplete()
    with log.database.write() as connection:
        repositories.finish_moves(connection)
        known = {repository.name: repository for repository in repositories.all(connection)}
        on_disk = set(repositories.on_disk())
        for name, repository in known.items():
            if name not in on_disk:
                logger.warning(
                    "removing %s from the hub: its folder %s is missing", name, repository.folder
                )
                log.record(connection, repository, Event(action="delete"))
                repositories.forget(connection, repository)
        for name in sorted(on_disk - known.keys(), key=str):
            logger.warning("adding %s to the hub: its folder had no row in the database", name)
            adopted = repositories.adopt(connection, name, private=True)
            log.record(connection, adopted, Event(action="create"))
        present = repositories.all(connection)
    # In threads, because each repository waits for a git process.
    with ThreadPoolExecutor(_NUM_THREADS) as threads:
        list(threads.map(partial(_record_or_complain, log=log), present))


async def reconcile(repositories: Repositories, log: EventLog) -> None:
    """Stores events for the changes of refs that did not come through the hub. Such changes are
    made by a person in a repository's folder, or by a git process whose hub was killed."""
    await repositories.for_each(log.database, partial(_record_or_complain, log=log))


def _record_or_complain(repository: Repository, log: EventLog) -> None:
    # Errors are only logged, because the hub must serve the other repositories.
    try:
        record_ref_changes(repository, log)
    except HubError as error:
        logger.error("the refs of %s cannot be read: %s", repository.name, error)
