"""The hub's state folder, with its database and its repositories. Only one process may use it at a
time."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from pipeline.hub.database import Database, open_database
from pipeline.hub.errors import HubInUse
from pipeline.hub.repositories.store import Repositories


def database_path(root: Path) -> Path:
    return root.absolute() / "hub.sqlite"


@contextlib.contextmanager
def only_hub_in(root: Path) -> Iterator[None]:
    """Makes the state folder if it does not exist, and holds its lock. Raises HubInUse if another
    process holds the lock."""
    # Only the owner may read the folder, because pushed data is private.
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = FileLock(root / "hub.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise HubInUse(
            f"Another hub uses {root}: stop that hub first, or choose another folder."
        ) from None
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def stopped_hub(root: Path) -> Iterator[tuple[Database, Repositories]]:
    """Opens the database and the repositories of a hub that does not run. No hub can start in this
    folder until the `with` block ends. Raises HubInUse if a hub runs."""
    with only_hub_in(root):
        database = open_database(database_path(root))
        try:
            repositories = Repositories(root.absolute())
            repositories.remove_incomplete()
            yield database, repositories
        finally:
            database.close()
