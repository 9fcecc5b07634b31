"""What opening the hub's database makes and refuses. Also: what a failed removal leaves."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from jobs.errors import OtherSchema
from pipeline.hub.database import open_database
from pipeline.hub.errors import HubError
from pipeline.hub.repositories import Repositories, Repository, RepositoryName


def test_commits_are_on_disk_where_events_are_stored(tmp_path: Path) -> None:
    database = open_database(tmp_path)
    with database.write() as connection:
        assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 2  # FULL
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
    database.close()


def test_a_database_of_another_version_is_refused_and_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "hub.sqlite"
    open_database(tmp_path).close()
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE alembic_version SET version_num = '1'")
    before = path.read_bytes()
    with pytest.raises(OtherSchema, match="another version of hotpush wrote it"):
        open_database(tmp_path)
    assert path.read_bytes() == before


def test_a_hub_whose_repositories_are_not_there_is_refused(tmp_path: Path) -> None:
    name = RepositoryName(type="dataset", owner="local", name="facts")
    database = open_database(tmp_path)
    repositories = Repositories(tmp_path, database)
    repositories.remove_incomplete()
    with repositories.prepared(name) as prepared, database.write() as connection:
        repositories.add(connection, prepared)
    database.close()
    (tmp_path / "repos").rename(tmp_path / "elsewhere")
    with pytest.raises(HubError, match=r"none of their folders is in .*/repos"):
        open_database(tmp_path)
    (tmp_path / "elsewhere").rename(tmp_path / "repos")
    open_database(tmp_path).close()


@pytest.mark.parametrize("is_there", [True, False])
def test_a_removal_that_fails_says_why_and_leaves_the_folder_as_it_was(
    tmp_path: Path, is_there: bool
) -> None:
    repositories = Repositories(tmp_path, open_database(tmp_path))
    repositories.remove_incomplete()
    name = RepositoryName(type="dataset", owner="local", name="facts")
    folder = repositories.folder("1")
    if is_there:
        folder.mkdir(parents=True)
    facts = Repository(id="1", name=name, created_at=0, folder=folder)
    with pytest.raises(OSError, match="the disk is full"), repositories.removal(facts):
        raise OSError("the disk is full")
    assert folder.exists() == is_there
