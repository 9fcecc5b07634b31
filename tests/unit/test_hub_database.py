"""What opening the hub's database makes and refuses; what a failed removal leaves. The hub ends a
git process that needs too long, and notices one that fails."""

import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from jobs.errors import OtherSchema
from pipeline.hub.database import open_database
from pipeline.hub.errors import BadRequest, HubError
from pipeline.hub.git import git
from pipeline.hub.repositories import Repositories, Repository, RepositoryName, read_refs

FACTS = RepositoryName(type="dataset", owner="local", name="facts")


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
    database = open_database(tmp_path)
    repositories = Repositories(tmp_path, database)
    repositories.remove_incomplete()
    with repositories.prepared(FACTS) as prepared, database.write() as connection:
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
    folder = repositories.folder("1")
    if is_there:
        folder.mkdir(parents=True)
    facts = Repository(id="1", name=FACTS, created_at=0, folder=folder)
    with pytest.raises(OSError, match="the disk is full"), repositories.removal(facts):
        raise OSError("the disk is full")
    assert folder.exists() == is_there


def test_git_that_waits_for_ever_is_too_slow(tmp_path: Path) -> None:
    """It waits for the writer of a pipe, which never comes."""
    git(tmp_path, "init", "-q", "--bare")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadRequest, match=r"git config needed more than 0\.1 s"):
        git(tmp_path, "config", "--file", str(tmp_path / "pipe"), "--list", seconds=0.1)


def commit(folder: Path) -> str:
    tree = git(folder, "mktree").decode().strip()
    who = {
        f"GIT_{role}_{field}": "ada"
        for role in ("AUTHOR", "COMMITTER")
        for field in ("NAME", "EMAIL")
    }
    return git(folder, "commit-tree", tree, "-m", "one", extra=who).decode().strip()


def test_only_a_ref_that_git_cannot_read_keeps_the_hub_from_the_others(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q", "--bare")
    facts = Repository(id="1", name=FACTS, created_at=0, folder=tmp_path)
    sha = commit(tmp_path)
    heads = tmp_path / "refs" / "heads"
    for name in ("main", "no..name"):  # git warns of the second one, which is no ref
        (heads / name).write_text(f"{sha}\n")
    assert read_refs(facts) == {"refs/heads/main": sha}
    (heads / "main").write_text("garbage\n")
    with pytest.raises(HubError, match="broken ref refs/heads/main"):
        read_refs(facts)
