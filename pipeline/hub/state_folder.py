"""The hub's state folder: its database and its repositories, for one process at a time."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from pipeline.hub.database import Database, open_database
from pipeline.hub.errors import HubInUse
from pipeline.hub.repositories import Repositories


def database_path(root: Path) -> Path:
    return root.absolute() / "hub.sqlite"


@contextlib.contextmanager
def only_hub_in(root: Path) -> Iterator[None]:
    """Raises HubInUse."""
    # Only for its owner: what is pushed here is private.
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = FileLock(root / "hub.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise HubInUse(
            f"Another hub uses {root}: stop it first, or give this one a folder of its own."
        ) from None
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def stopped_hub(root: Path) -> Iterator[tuple[Database, Repositories]]:
    """What a hub that is not running has; none can start meanwhile. Raises HubInUse."""
    with only_hub_in(root):
        database = open_database(database_path(root))
        try:
            repositories = Repositories(root.absolute())
            repositories.clear_leftovers()
            yield database, repositories
        finally:
            database.close()
