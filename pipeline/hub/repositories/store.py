"""Creates, finds, moves and removes the bare git repositories and their rows in the database. The
callers store the events."""

import asyncio
import logging
import secrets
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from sqlalchemy import Connection, Row, and_, delete, insert, select, update
from sqlalchemy.sql.elements import ColumnElement

from pipeline.hub.database import Database
from pipeline.hub.errors import BadRequest, Conflict, RepositoryNotFound
from pipeline.hub.git.process import clear_repository, end_processes, git
from pipeline.hub.large_files.store import LargeFiles
from pipeline.hub.repositories.names import (
    DEFAULT_BRANCH,
    REPOSITORY_TYPES,
    RepositoryName,
    repository_name,
)
from pipeline.hub.schema import repositories as table

logger = logging.getLogger(__name__)

# gc, autogc: git collects no garbage during a push, so that the push does not take longer. Commits
# that no ref leads to are removed only by `garbage.py`.
# allowAnySHA1InWant: a client can fetch any commit by its sha. A job may need a commit that a
# force-push removed from its branch.
# fsync: a push that the hub has confirmed survives a power cut.
# fsckObjects: git refuses a push of a tree with '..' or '.git' in it, so nobody can clone the tree.
_CONFIG = """\
[core]
\trepositoryformatversion = 0
\tfilemode = true
\tbare = true
\tfsync = all
\tfsyncMethod = batch
[gc]
\tauto = 0
\tpruneExpire = never
[receive]
\tautogc = false
[transfer]
\tfsckObjects = true
[http]
\treceivepack = true
[uploadpack]
\tallowAnySHA1InWant = true
\tallowFilter = true
"""

# While a repository is moved, its folder has an empty file whose name is the repository's id with
# this suffix. It tells `finish_moves` which row the folder belongs to.
_MOVING = ".moving"


@dataclass(frozen=True, kw_only=True)
class Repository:
    id: str
    name: RepositoryName
    private: bool
    created_at: float
    folder: Path


class Repositories:
    """The repositories in `root/repos/<type>s/<owner>/<name>.git`. A new repository is made in
    `root/incoming`. A deleted repository is first moved to `root/removed`."""

    def __init__(self, root: Path) -> None:
        self.incoming = root / "incoming"
        """Holds unfinished repositories and pushes. It is emptied when the hub starts."""
        self._root = root
        self._removed = root / "removed"
        self._repos = root / "repos"
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._places = threading.Lock()

    @asynccontextmanager
    async def locked(self, find: Callable[[], Repository]) -> AsyncIterator[Repository]:
        """Gives the repository that `find` returns, and holds its lock within the block. Code that
        changes refs takes the lock before the change, and holds it until the event is stored.

        While this waits for the lock, the repository may be moved or removed, and another one may
        get its name. So this calls `find` again under the lock. Raises the errors of `find`.
        """
        while True:
            found = await asyncio.to_thread(find)
            async with self._locks[found.id]:
                repository = await asyncio.to_thread(find)
                if repository.id == found.id:
                    yield repository
                    return

    async def for_each(self, database: Database, act: Callable[[Repository], object]) -> None:
        """Calls `act` in a thread for each repository whose folder exists, under its lock."""

        def find(id: str) -> Repository:
            with database.read() as connection:
                return self.find_by_id(connection, id)

        with database.read() as connection:
            ids = [repository.id for repository in self.all(connection)]
        for id in ids:
            with suppress(RepositoryNotFound):  # the repository was removed meanwhile
                async with self.locked(partial(find, id)) as repository:
                    if repository.folder.exists():
                        await asyncio.to_thread(act, repository)

    def folder(self, name: RepositoryName) -> Path:
        return self._repos / f"{name.type}s" / name.owner / f"{name.name}.git"

    def find(self, connection: Connection, name: RepositoryName) -> Repository:
        """The repository of this name, in upper or lower case. Raises RepositoryNotFound."""
        row = connection.execute(select(table).where(_is(name))).one_or_none()
        if row is not None:
            return self._from_row(row)
        raise RepositoryNotFound(
            f"There is no {name} here: check the name, or create the repository with "
            f"`hf repos create {name.id} --type {name.type}`."
        )

    def find_by_id(self, connection: Connection, id: str) -> Repository:
        """The repository of this id, whatever its name is now. Raises RepositoryNotFound."""
        row = connection.execute(select(table).where(table.c.id == id)).one_or_none()
        if row is None:
            raise RepositoryNotFound(f"There is no repository with the id {id} here any more.")
        return self._from_row(row)

    def all(self, connection: Connection) -> list[Repository]:
        return [self._from_row(row) for row in connection.execute(select(table))]

    @contextmanager
    def prepared(self, name: RepositoryName) -> Iterator[Repository]:
        """An empty repository whose folder nobody sees yet. The block calls `placed`."""
        aside = self.incoming / f"{secrets.token_hex(12)}.git"
        try:
            git(aside, "init", "--quiet", "--bare", "--template=")
            (aside / "HEAD").write_text(f"ref: {DEFAULT_BRANCH}\n")
            (aside / "config").write_text(_CONFIG)
            yield Repository(
                id=aside.stem, name=name, private=True, created_at=time.time(), folder=aside
            )
        finally:
            shutil.rmtree(aside, ignore_errors=True)  # it is still there after an error

    @contextmanager
    def placed(self, folder: Path, name: RepositoryName) -> Iterator[None]:
        """Moves `folder` to the place of a repository of this name before the block, in which the
        caller stores the name, and back if the block raises an error. Raises Conflict if the place
        is taken."""
        place = self.folder(name)
        # If only the case of a repository's name changes, a file system that ignores case finds the
        # repository's own folder.
        with self._places:  # two requests may want the same place
            if place.exists() and not place.samefile(folder):
                raise _taken(name)
            place.parent.mkdir(parents=True, exist_ok=True)
            folder.rename(place)
        with _moved_back(place, folder):
            yield

    @contextmanager
    def moving(self, repository: Repository, to: RepositoryName) -> Iterator[None]:
        """As `placed`. If the hub is killed within the block, its next start calls
        `finish_moves`."""
        mark = f"{repository.id}{_MOVING}"
        (repository.folder / mark).touch()
        try:
            with self.placed(repository.folder, to):
                yield
        except Conflict:
            (repository.folder / mark).unlink()
            raise
        # After an error the file stays, because the error may come after the commit.
        (self.folder(to) / mark).unlink()

    @contextmanager
    def removal(self, repository: Repository) -> Iterator[None]:
        """Moves the repository's folder away before the block. If the block raises an error, the
        folder is moved back, else it is deleted."""
        aside = self._removed / f"{repository.id}.git"
        # A person may have removed the folder.
        is_there = repository.folder.exists()
        if is_there:
            repository.folder.rename(aside)
        with _moved_back(aside, repository.folder) if is_there else nullcontext():
            yield
        shutil.rmtree(aside, ignore_errors=True)

    def adopt(self, connection: Connection, name: RepositoryName, *, private: bool) -> Repository:
        """Adds the row of a repository whose folder exists. Raises Conflict if the name is
        taken."""
        self._check_free(connection, name)
        values = {
            "id": secrets.token_hex(12),
            "type": name.type,
            "owner": name.owner,
            "name": name.name,
            "private": private,
            "created_at": time.time(),
        }
        connection.execute(insert(table).values(values))
        return self.find(connection, name)

    def set_private(self, connection: Connection, repository: Repository, private: bool) -> None:
        connection.execute(update(table).where(table.c.id == repository.id).values(private=private))

    def forget(self, connection: Connection, repository: Repository) -> None:
        """Deletes the row of the repository."""
        connection.execute(delete(table).where(table.c.id == repository.id))

    def rename(self, connection: Connection, repository: Repository, to: RepositoryName) -> None:
        """Gives the repository the name `to`. Raises Conflict if this name is taken."""
        self._check_free(connection, to, but=repository)
        connection.execute(
            update(table).where(table.c.id == repository.id).values(owner=to.owner, name=to.name)
        )

    def finish_moves(self, connection: Connection) -> None:
        """Gives each folder whose move was interrupted the name in its repository's row. This is
        the old name, or the new one if the transaction of the move was committed. Called before the
        hub answers a request."""
        for mark in list(self._repos.glob(f"*s/*/*.git/*{_MOVING}")):
            folder = mark.parent
            with suppress(RepositoryNotFound):
                named = self.find_by_id(connection, mark.stem).folder
                # If only the case of the name changes, a file system that ignores case finds the
                # folder under both names.
                if named != folder and (not named.exists() or named.samefile(folder)):
                    folder = folder.rename(named)
                    logger.warning(
                        "the hub was killed while it moved a repository: its folder is %s", named
                    )
            (folder / mark.name).unlink()

    def _check_free(
        self, connection: Connection, name: RepositoryName, but: Repository | None = None
    ) -> None:
        row = connection.execute(select(table).where(_is(name))).one_or_none()
        if row is not None and (but is None or row.id != but.id):
            raise _taken(self._from_row(row).name)

    def remove_incomplete(self) -> None:
        """Removes what a killed hub left unfinished. Called before the hub answers a request."""
        end_processes(self._root)
        for folder in (self.incoming, self._removed):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        for repository in self._repos.glob("*s/*/*.git"):
            clear_repository(repository)
            LargeFiles(repository).remove_incomplete()

    def on_disk(self) -> Iterator[RepositoryName]:
        """The names of all repository folders. Skips, and logs, a folder with an invalid name."""
        for type in REPOSITORY_TYPES:
            for folder in sorted(self._repos.glob(f"{type}s/*/*.git")):
                name = folder.name.removesuffix(".git")
                try:
                    yield repository_name(type, folder.parent.name, name)
                except BadRequest as error:
                    logger.warning("the hub ignores the folder %s: %s", folder, error)

    def _from_row(self, row: Row[tuple[object, ...]]) -> Repository:
        name = RepositoryName(type=row.type, owner=row.owner, name=row.name)
        return Repository(
            id=row.id,
            name=name,
            private=row.private,
            created_at=row.created_at,
            folder=self.folder(name),
        )


def _is(name: RepositoryName) -> ColumnElement[bool]:
    return and_(table.c.type == name.type, table.c.owner == name.owner, table.c.name == name.name)


def _taken(name: RepositoryName) -> Conflict:
    return Conflict(
        f"There is a {name} here already: choose another name. If the hub does not list it, "
        "somebody put its folder there: restart the hub, which then adds it."
    )


@contextmanager
def _moved_back(place: Path, folder: Path) -> Iterator[None]:
    """Moves what is at `place` to `folder` if the block raises an error."""
    try:
        yield
    except BaseException:
        place.rename(folder)
        raise
