"""A database of another version is refused by every command, and none makes the other one anew."""

import sqlite3
from contextlib import closing
from pathlib import Path

from typer.testing import CliRunner

from jobs.errors import JobError
from jobs.store import JobStore
from pipeline.cli.main import app
from pipeline.errors import PipelineError
from tests.stack_fixtures import Workplace, configure, workplace

__all__ = ["workplace"]


def refused(workplace: Workplace, *command: str) -> str:
    """Why the command, run in this process, did nothing."""
    result = CliRunner().invoke(app, command, env=workplace.env)
    assert isinstance(result.exception, PipelineError | JobError), result.output
    return str(result.exception)


def all_bytes(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*.sqlite")}


def test_up_makes_no_database_where_the_other_is_of_a_newer_release(workplace: Workplace) -> None:
    configure(workplace)
    for folder in ("jobs", "hub"):
        (workplace.home / folder).mkdir(parents=True)
    jobs = workplace.home / "jobs" / "jobs.sqlite"
    JobStore.open(jobs).close()
    with closing(sqlite3.connect(jobs)) as connection, connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    before = all_bytes(workplace.home)
    for command in (["up"], ["up", "--detach"], ["jobs", "run", "--", "true"], ["status"]):
        assert "'9999'" in refused(workplace, *command)
        assert all_bytes(workplace.home) == before, command


def test_commands_that_look_make_no_database(workplace: Workplace) -> None:
    configure(workplace)
    for command, told in (
        (["jobs", "ls"], "[]"),
        (["status"], '"queue": []'),
        (["doctor"], f"{workplace.home} does not exist"),
    ):
        result = CliRunner().invoke(app, [*command, "--json"], env=workplace.env)
        assert told in result.stdout, result.exception
    assert not workplace.home.exists() or all_bytes(workplace.home) == {}
