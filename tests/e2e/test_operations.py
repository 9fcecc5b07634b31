"""docs/operations.md as it stands there; what the doctor finds; databases of other releases."""

import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.stack_fixtures import Workplace, clone, configure, facts, stack_up, workplace

__all__ = ["workplace"]

DOCS = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", DOCS, re.MULTILINE | re.DOTALL)


def findings(workplace: Workplace, code: int = 1) -> dict[str, str]:
    """What is wrong, by check."""
    found = workplace.json("doctor", code=code)
    assert all(finding["next_step"] for finding in found if finding["level"] == "wrong")
    return {each["check"]: each["message"] for each in found if each["level"] == "wrong"}


@pytest.mark.slow
def test_the_blocks_run_as_they_stand(workplace: Workplace) -> None:
    train = "[pipelines.train]\nmax_tokens = 2000\nmax_length = 64\nevaluations = 2\n"
    (workplace.folder / "pipeline.toml").write_text("\n".join([*blocks("toml"), train]))
    commands = workplace.folder / "bin"
    commands.mkdir()
    (commands / "pipeline").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m pipeline "$@"\n')
    (commands / "pipeline").chmod(0o755)
    ports = {8071: "JOBS__METRICS_PORT", 8070: "HUB__PORT", 8000: "SERVING__PORT"}
    script = "\n".join(["set -euo pipefail", *blocks("bash")])
    for port, name in ports.items():
        script = script.replace(f":{port}/", f":{workplace.env[f'PIPELINE_{name}']}/")

    assert "\nnotes: push to http://127.0.0.1:" in workplace.run("up", "--detach")
    try:
        checkout = clone(workplace, "notes")
        job = workplace.wait_for_job(checkout.push({"facts.jsonl": facts(0, 60)}))
        assert job["outcome"]["result"] == "promoted", job["outcome"]
        told = workplace.folder / "outcomes.jsonl"
        until(lambda: told.exists() and told.read_text().endswith("}"))
        done = workplace_call(workplace, script, commands)
    finally:
        workplace.run("down")
    outcome = json.loads(told.read_text())
    assert (outcome["pipeline"], outcome["result"]) == ("notes", "promoted")
    assert 'pipeline_commit_to_serving_seconds_count{pipeline="notes"} 1.0' in done
    assert "is kept until it is unpinned" in done
    assert (workplace.folder / "pipeline-backup" / "tokens.json").exists()

    # One push, from log to log.
    (delivery_id,) = job["outcome"]["delivery_ids"]
    (delivered,) = logged(workplace, "hub", delivery_id=delivery_id)
    assert delivered["message"].endswith(": taken")
    assert logged(workplace, "receiver", delivery_id=delivery_id, job_id=job["id"])
    ran = logged(workplace, "runner", job_id=job["id"])
    assert ran[0]["delivery_ids"] == [delivery_id]
    assert logged(workplace, "serve", release=job["outcome"]["release"])


def test_the_unit_is_one_that_systemd_takes(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("there is no systemd on this machine")
    (unit,) = blocks("ini")
    assert "\nExecStart=%h/hotpush/.venv/bin/pipeline up\n" in unit
    file = tmp_path / "notes.service"
    file.write_text(unit.replace("%h/hotpush/.venv/bin/pipeline", sys.executable))
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    done = subprocess.run(
        [analyze, "--user", "verify", str(file)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def logged(workplace: Workplace, service: str, **ids: str) -> list[dict[str, Any]]:
    """Lines of its logger about these; what a service says when it starts is for a person."""
    text = (workplace.home / "logs" / f"{service}.log").read_text()
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return [line for line in lines if ids.items() <= line.items()]


def workplace_call(workplace: Workplace, script: str, commands: Path) -> str:
    env = {**workplace.env, "PATH": f"{commands}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=workplace.folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_doctor_finds_a_damaged_release_a_dead_delivery_and_a_failed_job(
    workplace: Workplace,
) -> None:
    from jobs.outcome import JobOutcome
    from jobs.spec import JobSpec
    from jobs.store import JobStore
    from pipeline.hub.database import open_database
    from serving.weights.releases import set_current
    from tests.serving_fixtures import echo_release

    configure(workplace)
    assert findings(workplace).keys() == {"state"}
    folder = workplace.home / "releases" / "facts"
    release = echo_release(folder, 1)
    set_current(folder, release.id)
    shard = next((folder / release.id).glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    (folder / ".unfinished-1").mkdir()
    (workplace.home / "jobs").mkdir()
    with JobStore.open(workplace.home / "jobs" / "jobs.sqlite") as store:
        store.submit(JobSpec(command=("true",), pipeline="facts"))
        job = store.claim("me", 60)
        assert job is not None
        store.finish(job.id, "me", JobOutcome(result="failed", reason="the moon was full"))
    (workplace.home / "hub").mkdir()
    open_database(workplace.home / "hub" / "hub.sqlite").close()
    with closing(sqlite3.connect(workplace.home / "hub" / "hub.sqlite")) as connection:
        connection.execute("PRAGMA foreign_keys = OFF")
        dead: dict[str, Any] = {
            row[1]: 0 for row in connection.execute("PRAGMA table_info(deliveries)") if row[3]
        }
        dead |= {"id": "d1", "webhook_id": "w1", "status": "dead", "payload": "{}"}
        names, marks = ", ".join(dead), ", ".join(f":{name}" for name in dead)
        connection.execute(f"INSERT INTO deliveries ({names}) VALUES ({marks})", dead)
        connection.commit()
    workplace.run("env")  # makes the tokens
    found = workplace.json("doctor", code=1)
    said = " ".join(finding["message"] for finding in found if finding["level"] == "wrong")
    for words in ("truncated", "the moon was full", "1 were given up", "unfinished folders"):
        assert words in said, found


def test_doctor_names_a_port_that_another_program_has(workplace: Workplace) -> None:
    import socket

    configure(workplace)
    workplace.home.mkdir()
    port = int(workplace.env["PIPELINE_RECEIVER__PORT"])
    with socket.create_server(("127.0.0.1", port)):
        assert f"port {port} of the receiver" in findings(workplace)["ports"]


def test_doctor_names_an_old_git_and_a_release_that_is_gone(workplace: Workplace) -> None:
    from serving.weights.releases import set_current
    from tests.serving_fixtures import echo_release

    configure(workplace)
    programs = workplace.folder / "programs"
    programs.mkdir()
    (programs / "git").write_text("#!/bin/sh\necho git version 2.30.2\n")
    (programs / "git").chmod(0o755)
    folder = workplace.home / "releases" / "facts"
    release = echo_release(folder, 1)
    set_current(folder, release.id)
    shutil.rmtree(folder / release.id)
    path = f"{programs}{os.pathsep}{workplace.env['PATH']}"
    found = findings(replace(workplace, env={**workplace.env, "PATH": path}))
    assert found["git"] == "it is 2.30.2"
    assert release.id in found["releases"] and "gone" in found["releases"]


# Databases of other releases


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
    open_database(hub).close()
    return {"jobs": jobs, "hub": hub}


@pytest.mark.parametrize("which", ["jobs", "hub"])
def test_a_newer_schema_is_refused_and_not_touched(
    which: str, workplace: Workplace, databases: dict[str, Path]
) -> None:
    before = set_schema(databases[which], "9999")
    command = ("hub",) if which == "hub" else ("jobs", "ls")
    done = subprocess.run(
        [sys.executable, "-m", "pipeline", *command],
        env=workplace.env,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1
    assert "'9999'" in done.stderr and "newer release" in done.stderr
    assert "Traceback" not in done.stderr
    assert databases[which].read_bytes() == before
    found = findings(workplace)
    assert "9999" in found["hub database" if which == "hub" else "job database"]


def all_bytes(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*.sqlite")}


def make_old_hub(database: Path) -> str:
    """As the first release made it: a dataset with one commit, and a webhook. Returns the sha."""
    from alembic import command
    from alembic.config import Config
    from sqlalchemy import create_engine

    database.unlink()
    config = Config()
    config.set_main_option("script_location", "pipeline.hub:migrations")
    engine = create_engine(f"sqlite:///{database}")
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "0001")
    engine.dispose()
    repository = database.parent / "repos" / "datasets" / "local" / "facts.git"
    repository.parent.mkdir(parents=True)
    stream = (
        "commit refs/heads/main\ncommitter Ada <ada@example.org> 1700000000 +0000\n"
        "data <<END\nFirst\nEND\nM 644 inline README.md\ndata <<END\n# Facts\nEND\n"
    )
    for arguments, text in ((["init", "--bare", "--template="], ""), (["fast-import"], stream)):
        subprocess.run(
            ["git", "--git-dir", str(repository), *arguments, "--quiet"],
            input=text.encode(),
            check=True,
        )
    sha = (repository / "refs/heads/main").read_text().strip()
    with closing(sqlite3.connect(database)) as connection:
        for table, values in (
            ("repositories", ("r1", "dataset", "local", "facts", True, 1700000000.0)),
            ("refs", ("r1", "refs/heads/main", sha)),
            ("webhooks", ("w1", "http://127.0.0.1:9/", "[]", '["repo"]', None, False, 1.0)),
        ):
            marks = ", ".join("?" * len(values))
            connection.execute(f"INSERT INTO {table} VALUES ({marks})", values)
        connection.commit()
    return sha


def test_up_upgrades_neither_database_where_one_is_of_a_newer_release(
    workplace: Workplace, databases: dict[str, Path]
) -> None:
    make_old_hub(databases["hub"])
    set_schema(databases["jobs"], "9999")
    before = all_bytes(workplace.home)
    for command in (["up"], ["up", "--detach"], ["jobs", "run", "--", "true"], ["status"]):
        done = subprocess.run(
            [sys.executable, "-m", "pipeline", *command],
            env=workplace.env,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 1, command
        assert "'9999'" in done.stderr and "Traceback" not in done.stderr
        assert all_bytes(workplace.home) == before, command


def test_commands_that_look_make_no_database(workplace: Workplace) -> None:
    configure(workplace)
    assert workplace.json("jobs", "ls") == []
    assert workplace.json("status")["pipelines"][0]["queue"] == []
    workplace.json("doctor", code=1)
    assert not workplace.home.exists() or all_bytes(workplace.home) == {}


def test_a_store_that_has_to_be_upgraded_is_not_by_looking(
    workplace: Workplace, databases: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from jobs import migrations, store
    from jobs.errors import OlderSchema

    monkeypatch.setattr(migrations, "HEAD", "9998")
    monkeypatch.setattr(store, "HEAD", "9998")
    before = all_bytes(workplace.home)
    with pytest.raises(OlderSchema, match=r"has schema '\d+'; `pipeline up` brings it to '9998'"):
        store.JobStore.open_to_read(databases["jobs"])
    assert all_bytes(workplace.home) == before


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
def test_an_older_state_folder_is_migrated_at_the_start_and_then_all_is_well(
    workplace: Workplace, databases: dict[str, Path]
) -> None:
    """The oldest there is: a hub of the first release, and jobs from before the first migration."""
    from jobs.migrations import HEAD
    from pipeline.hub.database import SCHEMA_REVISION

    databases["jobs"].unlink()
    databases["jobs"].touch()
    sha = make_old_hub(databases["hub"])
    with stack_up(workplace):
        status = workplace.json("status")
        assert findings(workplace, code=0) == {}
        old, webhook = sorted(workplace.json("webhooks", "ls"), key=lambda one: one["id"] != "w1")
        workplace.run("webhooks", "disable", webhook["id"])
        (workplace.home / "tokens.json").chmod(0o644)
        found = findings(workplace)
        watches = _webhook_findings(workplace, webhook["id"])
        down = _found_while_the_receiver_is_down(workplace)
    assert "does not watch local/facts" in watches["other"]
    assert "the hub has none for" in watches["deleted"]
    assert down == {"receiver": "it is down, and will be started again"}
    assert (old["id"], old["status"]) == ("w1", "enabled")
    assert status["pipelines"][0]["dataset_head"] == sha
    assert status["uptime_seconds"] > 0 and status["versions"]["python"]
    assert {service["restarts"] for service in status["services"]} == {0}
    assert status["pipelines"][0]["queue_age_seconds"] is None
    assert "disabled" in found["webhook"] and "644" in found["tokens"]
    for name, head in (("jobs", HEAD), ("hub", SCHEMA_REVISION)):
        with closing(sqlite3.connect(databases[name])) as connection:
            revision = connection.execute("SELECT version_num FROM alembic_version").fetchone()
        assert revision == (head,)
