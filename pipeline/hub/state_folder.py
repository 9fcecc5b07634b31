"""The hub's state folder, with its database and its repositories. Only one process may use it at a
time."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from pipeline.hub.database import Database, open_database, read_only
from pipeline.hub.errors import HubInUse
from pipeline.hub.repositories import Repositories, RepositoryName


def database_path(root: Path) -> Path:
    return root.absolute() / "hub.sqlite"


def folder_of(root: Path, name: RepositoryName) -> Path | None:
    """The folder of a repository of a hub, which may run in another process. None if the hub does
    not have the repository. Raises HubError."""
    if not database_path(root).exists():
        return None
    named = "SELECT id FROM repositories WHERE type = ? AND owner = ? AND name = ?"
    with read_only(database_path(root)) as connection:
        row = connection.execute(named, (name.type, name.owner, name.name)).fetchone()
    return None if row is None else Repositories(root).folder(row[0])


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
