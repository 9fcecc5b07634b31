"""Databases of other versions are refused and not touched; a missing one is made by `up`."""

import json
import os
import signal
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jobs.errors import JobError
from pipeline.cli.main import app
from pipeline.errors import PipelineError
from tests.stack_fixtures import Workplace, configure, findings, stack_up, workplace

__all__ = ["workplace"]


def set_schema(database: Path, revision: str) -> bytes:
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("UPDATE alembic_version SET version_num = ?", (revision,))
        connection.commit()
    return database.read_bytes()


@pytest.fixture
def databases(workplace: Workplace) -> dict[str, Path]:
    """Both databases, made by this release."""
    from jobs.store import JobStore
    from pipeline.hub.database import open_database

    configure(workplace)
    (workplace.home / "jobs").mkdir(parents=True)
    (workplace.home / "hub").mkdir()
    jobs, hub = workplace.home / "jobs" / "jobs.sqlite", workplace.home / "hub" / "hub.sqlite"
    JobStore.open(jobs).close()
    open_database(hub.parent).close()
    return {"jobs": jobs, "hub": hub}


def refused(workplace: Workplace, *command: str) -> str:
    """Why the command, run in this process, did nothing."""
    result = CliRunner().invoke(app, command, env=workplace.env)
    assert isinstance(result.exception, PipelineError | JobError), result.output
    return str(result.exception)


@pytest.mark.parametrize("which", ["jobs", "hub"])
def test_a_newer_schema_is_refused_and_not_touched(
    which: str, workplace: Workplace, databases: dict[str, Path]
) -> None:
    before = set_schema(databases[which], "9999")
    told = refused(workplace, *(("up",) if which == "hub" else ("jobs", "ls")))
    assert "'9999'" in told and "another version of hotpush" in told
    assert databases[which].read_bytes() == before


def all_bytes(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*.sqlite")}


def bring_repository(hub_folder: Path) -> str:
    """Makes a dataset with one commit, which the hub finds at its start. Returns the sha."""
    from pipeline.hub.repositories import RepositoryName
    from tests.hub_fixtures import stopped_hub

    with stopped_hub(hub_folder) as repositories:
        name = RepositoryName(type="dataset", owner="local", name="facts")
        with repositories.prepared(name) as prepared, repositories.database.write() as connection:
            repository = repositories.add(connection, prepared).folder
    stream = (
        "commit refs/heads/main\ncommitter Ada <ada@example.org> 1700000000 +0000\n"
        "data <<END\nFirst\nEND\nM 644 inline README.md\ndata <<END\n# Facts\nEND\n"
    )
    subprocess.run(
        ["git", "--git-dir", str(repository), "fast-import", "--quiet"],
        input=stream.encode(),
        check=True,
    )
    return (repository / "refs/heads/main").read_text().strip()


def test_up_makes_no_database_where_the_other_is_of_a_newer_release(
    workplace: Workplace, databases: dict[str, Path]
) -> None:
    databases["hub"].unlink()
    set_schema(databases["jobs"], "9999")
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


def _webhook_findings(workplace: Workplace, webhook_id: str) -> dict[str, str]:
    workplace.run("webhooks", "enable", webhook_id)
    workplace.run("webhooks", "update", webhook_id, "--watch", "dataset:local/other")
    found = {"other": findings(workplace)["webhook"]}
    workplace.run("webhooks", "delete", webhook_id, "--yes")
    return found | {"deleted": findings(workplace)["webhook"]}


def _found_while_the_receiver_is_down(workplace: Workplace) -> dict[str, str]:
    """`up`, which would start it again, is stopped meanwhile."""
    record = json.loads((workplace.home / "stack.json").read_text())
    (receiver,) = [child for child in record["children"] if child["name"] == "receiver"]
    os.kill(record["process"]["pid"], signal.SIGSTOP)
    try:
        os.kill(receiver["process"]["pid"], signal.SIGKILL)
        found = findings(workplace)
    finally:
        os.kill(record["process"]["pid"], signal.SIGCONT)
    return {check: said for check, said in found.items() if check not in ("webhook", "tokens")}


@pytest.mark.slow
def test_what_a_state_folder_lacks_is_made_at_the_start_and_then_all_is_well(
    workplace: Workplace, databases: dict[str, Path]
) -> None:
    """A repository that the hub does not know yet, and an empty file in place of the job store."""
    from jobs.schema import SCHEMA_REVISION as JOBS_SCHEMA
    from pipeline.hub.database import SCHEMA_REVISION

    databases["jobs"].unlink()
    databases["jobs"].touch()
    sha = bring_repository(databases["hub"].parent)
    with stack_up(workplace):
        status = workplace.json("status")
        assert findings(workplace, code=0) == {}
        [webhook] = workplace.json("webhooks", "ls")
        workplace.run("webhooks", "disable", webhook["id"])
        (workplace.home / "tokens.json").chmod(0o644)
        found = findings(workplace)
        watches = _webhook_findings(workplace, webhook["id"])
        down = _found_while_the_receiver_is_down(workplace)
    assert "does not watch local/facts" in watches["other"]
    assert "the hub has no webhook for" in watches["deleted"]
    assert "is suspended, so it neither stops nor restarts a service" in down.pop("stack")
    assert down == {"receiver": "it is down, and will be started again"}
    assert status["pipelines"][0]["dataset_head"] == sha
    assert status["uptime_seconds"] > 0
    assert {service["restarts"] for service in status["services"]} == {0}
    assert status["pipelines"][0]["queue_age_seconds"] is None
    assert "disabled" in found["webhook"] and "644" in found["tokens"]
    for name, head in (("jobs", JOBS_SCHEMA), ("hub", SCHEMA_REVISION)):
        with closing(sqlite3.connect(databases[name])) as connection:
            revision = connection.execute("SELECT version_num FROM alembic_version").fetchone()
        assert revision == (head,)
