"""A name is looked up again where its repository may have changed, and a failure undoes all."""

import asyncio
import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.hub import commits, repositories
from pipeline.hub.database import events, open_database
from pipeline.hub.events import EventLog, reconcile, record_ref_changes
from pipeline.hub.git import git
from pipeline.hub.repositories import Repositories, Repository, RepositoryName
from pipeline.hub.routes.repositories import NewRepository, create
from pipeline.hub.service import Identity
from pipeline.hub.settings import HubSettings
from tests.hub_fixtures import RunningHub, commit_file

pytest_plugins = ["tests.hub_plugin"]

FACTS, OLD = (RepositoryName(type="dataset", owner="local", name=name) for name in ("facts", "old"))
EMPTY_TREE = "4b825dc642cb6eb9a060e54bf8d69288fbee4904"
AUTHOR = {
    f"GIT_{who}_{what}": value
    for who in ("AUTHOR", "COMMITTER")
    for what, value in (("NAME", "Ada"), ("EMAIL", "ada@example.org"))
}


class Folder:
    """The repositories of a hub that is not served, with one commit in `local/facts`."""

    def __init__(self, root: Path) -> None:
        self.database = open_database(root / "hub.sqlite")
        self.log = EventLog(database=self.database, hub_url="http://hub")
        self.repositories = Repositories(root, self.database)
        self.repositories.remove_incomplete()
        self.first = self.create(FACTS)
        tree = git(self.first.folder, "mktree").decode().strip()
        assert tree == EMPTY_TREE
        commit = git(self.first.folder, "commit-tree", tree, "-m", "one", extra=AUTHOR)
        git(self.first.folder, "update-ref", "refs/heads/main", commit.decode().strip())
        record_ref_changes(self.first, self.log)

    def create(self, name: RepositoryName) -> Repository:
        with (
            self.repositories.prepared(name) as prepared,
            self.database.write() as connection,
        ):
            return self.repositories.add(connection, prepared)

    def find(self, name: RepositoryName = FACTS) -> Repository:
        return self.repositories.find(name)

    def replace(self) -> Repository:
        """Moves `local/facts` away, and creates an empty one in its place."""
        with self.database.write() as connection:
            self.repositories.rename(connection, self.first, OLD)
        return self.create(FACTS)

    async def is_waited_for(self) -> None:
        lock = self.repositories._locks[self.first.id]
        async with asyncio.timeout(30):
            while not lock._waiters:  # type: ignore[attr-defined]
                await asyncio.sleep(0.001)

    def changes(self) -> list[tuple[str, str | None]]:
        """The repository and the new commit of each event of a ref."""
        with self.database.read() as connection:
            rows = connection.execute(events.select().order_by(events.c.seq))
            return [
                (row.repository_id, change["new_sha"])
                for row in rows
                for change in row.updated_refs
            ]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    folder = Folder(tmp_path)
    yield folder
    folder.database.close()


def test_a_name_that_came_to_mean_another_repository_is_looked_up_again(folder: Folder) -> None:
    async def race() -> tuple[Repository, Repository]:
        async def wait() -> Repository:
            async with folder.repositories.locked(folder.find) as repository:
                return repository

        async with folder.repositories.locked(folder.find):
            waiting = asyncio.create_task(wait())
            await folder.is_waited_for()
            other = folder.replace()
        return await waiting, other

    found, other = asyncio.run(race())
    assert found == other != folder.first


def test_a_move_and_a_create_make_no_event_of_a_ref(folder: Folder) -> None:
    before = folder.changes()
    assert len(before) == 1

    async def race() -> None:
        async with folder.repositories.locked(folder.find):
            reconciling = asyncio.create_task(reconcile(folder.repositories, folder.log))
            await folder.is_waited_for()
            folder.replace()
        await reconciling

    asyncio.run(race())
    assert folder.changes() == before


def test_git_makes_a_repository_while_others_may_write(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []

    def watched(place: Path, *arguments: str, **options: Any) -> bytes:
        assert not folder.database._turn.locked()
        called.append(arguments[0])
        return git(place, *arguments, **options)

    monkeypatch.setattr(repositories, "git", watched)
    monkeypatch.setattr(commits, "git", watched)
    hub: Any = SimpleNamespace(
        log=folder.log,
        repositories=folder.repositories,
        database=folder.database,
        settings=HubSettings(owner=OLD.owner),
    )
    request: Any = SimpleNamespace(base_url="http://hub/")
    identity = Identity(user="Ada", role="write", token_name="hub")
    create(request, hub, identity, NewRepository(type=OLD.type, name=OLD.name))
    assert "init" in called and "update-ref" in called


@contextlib.contextmanager
def commits_fail(hub: RunningHub) -> Iterator[None]:
    """Every transaction that stores an event fails at its commit."""
    with contextlib.closing(sqlite3.connect(hub.root / "hub.sqlite")) as database:
        database.executescript(
            "CREATE TABLE lost (id REFERENCES repositories (id) DEFERRABLE INITIALLY DEFERRED);"
            "CREATE TRIGGER lose AFTER INSERT ON events BEGIN INSERT INTO lost VALUES ('x'); END;"
        )
        yield
        database.executescript("DROP TRIGGER lose; DROP TABLE lost;")


def test_a_failed_commit_creates_nothing(hub: RunningHub) -> None:
    with commits_fail(hub):
        body = {"name": "facts", "type": "dataset"}
        assert hub.request("POST", "/api/repos/create", json=body).status_code == 500
        assert not list(hub.root.glob("repos/*"))
        assert not list((hub.root / "incoming").iterdir())
    hub.create_dataset("local/facts")


def test_a_failed_commit_moves_nothing(hub: RunningHub, worktree: Path) -> None:
    sha = commit_file(hub, worktree, "a.txt", "1")
    hub.git("push", "-q", "origin", "main", cwd=worktree)
    with commits_fail(hub):
        body = {"fromRepo": "local/facts", "toRepo": "local/other", "type": "dataset"}
        assert hub.request("POST", "/api/repos/move", json=body).status_code == 500
    assert hub.api.dataset_info("local/facts").sha == sha
    hub.api.move_repo("local/facts", "local/other", repo_type="dataset")
    assert hub.api.dataset_info("local/other").sha == sha
