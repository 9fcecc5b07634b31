"""What the doctor finds of the things that jobs and their runner need, and of dead deliveries."""

import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jobs.outcome import JobOutcome
from jobs.process import identify
from jobs.spec import JobSpec
from jobs.store import JobStore
from pipeline.cli.main import app
from pipeline.doctor import checks as doctor
from pipeline.doctor.facts import Facts, Finding
from pipeline.paths import Home
from pipeline.settings import load_settings
from pipeline.stack.record import StackRecord
from pipeline.tokens import load_tokens
from serving.weights.release_store import set_current
from tests.jobs_fixtures import claim
from tests.ports import free_port
from tests.serving_fixtures import echo_release


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    monkeypatch.setenv("PIPELINE_SETTINGS", str(tmp_path / "pipeline.toml"))
    monkeypatch.setenv("PIPELINE_JOBS__METRICS_PORT", str(free_port()))
    home = Home(tmp_path / ".pipeline")
    home.root.mkdir()
    return home


def wrong(found: Iterator[Finding]) -> list[tuple[str, str]]:
    return [(each.message, each.next_step) for each in found]


def trainers(home: Home, *keys: str, table: str = "") -> list[tuple[str, str]]:
    text = '[[pipelines]]\nname = "a"\ndataset = "o/d"\n' + "\n".join(keys) + f"\n{table}\n"
    (home.root.parent / "pipeline.toml").write_text(text)
    return wrong(doctor.check_training(Facts(home, load_settings())))


def test_a_command_that_is_not_there(home: Home) -> None:
    assert trainers(home) == []
    [(message, step)] = trainers(home, 'command = ["no-such-trainer", "--fast"]')
    assert message.startswith("a: no-such-trainer is not a program on PATH")
    assert "`command` under [[pipelines]]" in step

    program = home.root.parent / "train.sh"
    [(message, _)] = trainers(home, 'command = ["./train.sh"]')
    assert "train.sh is not an executable program" in message
    program.write_text("#!/bin/sh\n")
    assert len(trainers(home, 'command = ["./train.sh"]')) == 1, "it is not executable"
    program.chmod(0o755)
    assert trainers(home, 'command = ["./train.sh"]') == []


def test_what_the_training_needs_and_is_not_installed(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = {"datasets"}
    finds = {name: find_spec(name) for name in doctor.NEEDED_TO_TRAIN}

    def find(name: str) -> object:
        return None if name in absent else finds.get(name, True)

    monkeypatch.setattr(doctor, "find_spec", find)
    [extra] = trainers(home)
    assert "datasets not installed" in extra[0]
    assert extra[1].startswith("in the folder of hotpush: pip install -e '.[torch]'")


def test_a_disk_that_is_nearly_full(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    def found() -> list[tuple[str, str]]:
        told = doctor.check_state_folder(Facts(home, load_settings()))
        return wrong(each for each in told if each.check == "disk")

    monkeypatch.setattr(doctor, "SPARE_BYTES", 0)
    assert found() == []
    monkeypatch.setattr(doctor, "SPARE_BYTES", 1 << 62)  # as if the disk had almost no room left
    [(message, step)] = found()
    assert message.endswith(f"GiB free on the disk of {home.root}")
    assert "pipeline releases prune" in step


def test_a_served_release_that_is_gone(home: Home) -> None:
    (home.root.parent / "pipeline.toml").write_text('[[pipelines]]\nname = "a"\ndataset = "o/d"\n')
    folder = home.releases_dir / "a"
    release = echo_release(folder, 1)
    set_current(folder, release.id)
    shutil.rmtree(folder / release.id)
    [found] = wrong(doctor.check_releases(Facts(home, load_settings())))
    gone = f"{release.id} is served, but its folder is gone"
    assert found == (gone, "pipeline releases rollback")


def test_the_state_of_a_pipeline_whose_record_is_damaged(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home.root.parent / "pipeline.toml").write_text('[[pipelines]]\nname = "a"\ndataset = "o/d"\n')
    monkeypatch.setenv("PIPELINE_SERVING__PORT", str(free_port()))
    (home.releases_dir / "a").mkdir(parents=True)
    (home.releases_dir / "a" / "served.json").write_text("{")
    settings = load_settings()
    found = Facts(home, settings).of_pipeline(settings.pipeline("a"), now=0)
    assert "served.json" in found["served"]["unreadable"]
    assert (found["served"]["release"], found["pending_release"]) == ("current", None)


def test_after_a_failed_job_the_next_step_is_to_wait_for_the_job_that_follows(home: Home) -> None:
    (home.root.parent / "pipeline.toml").write_text('[[pipelines]]\nname = "a"\ndataset = "o/d"\n')

    def step() -> str:
        [(_, step)] = wrong(doctor.check_last_jobs(Facts(home, load_settings())))
        return step

    spec = JobSpec(command=("x",), pipeline="a")
    home.jobs_database.parent.mkdir()
    with JobStore.open(home.jobs_database) as store:
        for _ in range(2):
            store.submit(spec, by_hand=True)
            job = claim(store, "runner")
            store.finish(job.id, "runner", JobOutcome(result="failed", reason="a bad row"))
            [(message, _)] = wrong(doctor.check_last_jobs(Facts(home, load_settings())))
            assert message == f"a: {job.id} failed: a bad row"
            assert step() == f"pipeline jobs logs {job.id}; then push again, or: pipeline jobs run"
        correction = store.submit(spec, by_hand=True)
        first = f"pipeline jobs logs {job.id}; then wait for job {correction.id}, which is"
        assert step() == f"{first} pending: pipeline jobs wait {correction.id}"
        store.claim("runner", 60)
        assert step() == f"{first} running: pipeline jobs wait {correction.id}"


def test_a_stack_without_a_runner_says_that_nobody_takes_its_jobs(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home.root.parent / "pipeline.toml").write_text('[[pipelines]]\nname = "a"\ndataset = "o/d"\n')
    me = identify(os.getpid())
    assert me is not None
    record = StackRecord(process=me, started_at=0.0, is_ready=True)
    home.stack_file.write_text(record.model_dump_json())
    home.jobs_database.parent.mkdir()

    def found() -> list[tuple[str, str]]:
        return wrong(doctor.check_queue(Facts(home, load_settings())))

    with JobStore.open(home.jobs_database) as store:
        job = store.submit(JobSpec(command=("x",), pipeline="a"))
        assert not found(), "a runner may take it at any moment"
        monkeypatch.setattr(doctor, "NO_RUNNER_SECONDS", -1)
        [(message, _)] = found()
        assert message.startswith(f"{job.id} is due") and "no runner takes it" in message
        claim(store)
        assert not found()


def test_a_stack_was_killed_if_its_record_is_left(home: Home) -> None:
    def found() -> list[tuple[str, str]]:
        return wrong(doctor.check_services(Facts(home, load_settings())))

    assert found() == []
    home.stack_file.write_text("{}")
    [(message, _)] = found()
    assert message.startswith("the stack was killed")


def test_nothing_is_wrong_is_said_in_words(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPELINE_HOME", str(home.root))
    monkeypatch.setattr(doctor, "SPARE_BYTES", 0)

    def doctor_says() -> tuple[int, str]:
        done = CliRunner().invoke(app, ["doctor"])
        return done.exit_code, done.stdout

    code, said = doctor_says()
    assert code == 1 and str(home.tokens_file) in said
    load_tokens(home.tokens_file)
    assert doctor_says() == (0, "nothing is wrong, but no stack is up\n")
    me = identify(os.getpid())
    assert me is not None
    record = StackRecord(process=me, started_at=0.0, is_ready=False)
    home.stack_file.write_text(record.model_dump_json())
    assert doctor_says() == (0, "nothing is wrong\n")


def test_dead_deliveries_are_counted(home: Home) -> None:
    home.hub_dir.mkdir()
    with closing(sqlite3.connect(home.hub_dir / "hub.sqlite")) as connection:
        connection.execute("CREATE TABLE deliveries (status)")
        connection.execute("INSERT INTO deliveries VALUES ('dead')")
        connection.commit()
    [(message, step)] = wrong(doctor.check_deliveries(Facts(home, load_settings())))
    assert message.startswith("1 were given up") and "pipeline webhooks replay" in step
