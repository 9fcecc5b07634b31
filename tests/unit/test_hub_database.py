"""The migrations lead to the schema that the code uses. Also: what a failed removal leaves."""

from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import create_engine

from pipeline.hub.database import KNOWN_REVISIONS, SCHEMA_REVISION, open_database
from pipeline.hub.repositories.names import RepositoryName
from pipeline.hub.repositories.store import Repositories, Repository
from pipeline.hub.schema import metadata
from pipeline.hub.webhooks.store import list_webhooks


def test_a_new_database_has_the_tables_of_the_code(tmp_path: Path) -> None:
    database = open_database(tmp_path / "hub.sqlite")
    with database.read() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
    database.close()


def test_the_revisions_of_the_code_are_those_of_the_migrations() -> None:
    config = Config()
    config.set_main_option("script_location", "pipeline.hub:migrations")
    scripts = ScriptDirectory.from_config(config)
    assert scripts.get_current_head() == SCHEMA_REVISION
    assert {script.revision for script in scripts.walk_revisions()} == set(KNOWN_REVISIONS)


def test_commits_are_on_disk_where_events_are_stored(tmp_path: Path) -> None:
    database = open_database(tmp_path / "hub.sqlite")
    with database.write() as connection:
        assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 2  # FULL
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
    with database.write_relaxed() as connection:
        assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 1  # NORMAL
    database.close()


def test_a_database_of_the_first_release_keeps_what_it_had(tmp_path: Path) -> None:
    path = tmp_path / "hub.sqlite"
    open_at(path, "0001", "INSERT INTO webhooks VALUES ('w', 'http://x/', '[]', '[]', NULL, 0, 1)")
    database = open_database(path)
    with database.read() as connection:
        [webhook] = list_webhooks(connection)
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
    assert (webhook.url, webhook.status, webhook.num_failures) == ("http://x/", "enabled", 0)
    database.close()


@pytest.mark.parametrize("is_there", [True, False])
def test_a_removal_that_fails_says_why_and_leaves_the_folder_as_it_was(
    tmp_path: Path, is_there: bool
) -> None:
    repositories = Repositories(tmp_path)
    repositories.remove_incomplete()
    name = RepositoryName(type="dataset", owner="local", name="facts")
    folder = repositories.folder(name)
    if is_there:
        folder.mkdir(parents=True)
    facts = Repository(id="1", name=name, private=True, created_at=0, folder=folder)
    with pytest.raises(OSError, match="the disk is full"), repositories.removal(facts):
        raise OSError("the disk is full")
    assert folder.exists() == is_there


def open_at(path: Path, revision: str, statement: str) -> None:
    """Makes a database as the release with that schema left it."""
    config = Config()
    config.set_main_option("script_location", "pipeline.hub:migrations")
    engine = create_engine(f"sqlite:///{path}")
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, revision)
        connection.exec_driver_sql(statement)
    engine.dispose()
