"""Makes the events agree with the repositories: what a kill left between git and the database."""

import logging
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from pipeline.hub.errors import HubError
from pipeline.hub.events import EventLog
from pipeline.hub.refs import record_ref_changes
from pipeline.hub.repositories import Repositories, Repository

logger = logging.getLogger(__name__)

_NUM_THREADS = 8


def reconcile_at_start(repositories: Repositories, log: EventLog) -> int:
    """Completes what a killed hub left half-done; returns how many ref changes had no event.

    Only safe before the first request: it takes no locks.
    """
    repositories.clear_leftovers()
    with log.database.write() as connection:
        known = {repository.name: repository for repository in repositories.all(connection)}
        on_disk = set(repositories.on_disk())
        for name, repository in known.items():
            if name not in on_disk:
                logger.warning("%s is gone from %s", name, repository.folder)
                log.record(connection, repository, action="delete")
                repositories.forget(connection, repository)
        for name in sorted(on_disk - known.keys(), key=str):
            logger.warning("found %s, which was not entered yet", name)
            log.record(
                connection, repositories.adopt(connection, name, private=True), action="create"
            )
        present = repositories.all(connection)
    # Each waits for a git process.
    with ThreadPoolExecutor(_NUM_THREADS) as threads:
        return sum(threads.map(partial(_record_or_complain, log=log), present))


async def reconcile(repositories: Repositories, log: EventLog) -> None:
    """Finds refs that moved behind the hub's back: by a git process that outlived a killed hub,
    or by hand in the folder."""
    await repositories.for_each(
        log.database, lambda repository: _record_or_complain(repository, log)
    )


def _record_or_complain(repository: Repository, log: EventLog) -> int:
    # One damaged repository must not keep the hub from serving the others.
    try:
        return len(record_ref_changes(repository, log))
    except HubError as error:
        logger.error("the refs of %s cannot be read: %s", repository.name, error)
        return 0
