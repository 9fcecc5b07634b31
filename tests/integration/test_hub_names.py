"""A change of a repository whose event cannot be stored is undone as a whole."""

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from tests.hub_fixtures import RunningHub, push_file

pytest_plugins = ["tests.hub_plugin"]


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
    sha = push_file(hub, worktree, "a.txt", "1")
    with commits_fail(hub):
        body = {"fromRepo": "local/facts", "toRepo": "local/other", "type": "dataset"}
        assert hub.request("POST", "/api/repos/move", json=body).status_code == 500
    assert hub.api.dataset_info("local/facts").sha == sha
    hub.api.move_repo("local/facts", "local/other", repo_type="dataset")
    assert hub.api.dataset_info("local/other").sha == sha
