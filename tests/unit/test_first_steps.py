"""`pipeline init` and `pipeline env`: which folder they mean; what `pipeline up` refuses; what the
other commands say in a folder of no project."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from pipeline.cli.main import app
from pipeline.errors import PipelineError

INIT = ("init", "--name", "notes", "--dataset", "local/notes")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("PIPELINE_HOME", raising=False)
    monkeypatch.delenv("PIPELINE_SETTINGS", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_init_writes_into_the_current_folder_whatever_the_shell_is_set_to(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = CliRunner().invoke(app, INIT)
    assert first.output.endswith("with: pipeline up\n")
    written = (folder / "pipeline.toml").read_text()
    monkeypatch.setenv("PIPELINE_SETTINGS", str(folder / "pipeline.toml"))
    monkeypatch.setenv("PIPELINE_HOME", str(folder / ".pipeline"))
    assert CliRunner().invoke(app, [*INIT, "--force"]).output.endswith("with: pipeline up\n")

    (folder / "two").mkdir()
    monkeypatch.chdir(folder / "two")
    second = CliRunner().invoke(app, ["init", "--name", "two", "--dataset", "local/two"])
    assert 'name = "two"' in (folder / "two" / "pipeline.toml").read_text()
    assert (folder / "pipeline.toml").read_text() == written
    assert second.output.endswith("unset PIPELINE_HOME PIPELINE_SETTINGS && pipeline up\n")


def test_init_overwrites_on_request_only(folder: Path) -> None:
    CliRunner().invoke(app, INIT)
    refused = CliRunner().invoke(app, INIT)
    assert isinstance(refused.exception, PipelineError)
    assert "overwrite it with --force" in str(refused.exception)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ("--name", "my notes", "--dataset", "local/notes"),
            "--name 'my notes': a name has letters",
        ),
        (("--name", "notes", "--dataset", "notes"), "--dataset 'notes': write it as OWNER/NAME"),
        ((*INIT[1:], "--base-model", "preset:big"), "--base-model 'preset:big': there is no such"),
    ],
)
def test_init_says_in_words_what_is_wrong(
    folder: Path, arguments: tuple[str, ...], words: str
) -> None:
    refused = CliRunner().invoke(app, ["init", *arguments])
    assert words in str(refused.exception)
    assert "^" not in str(refused.exception)


def test_env_begins_nothing_where_no_project_is(folder: Path) -> None:
    refused = CliRunner().invoke(app, ["env"])
    assert isinstance(refused.exception, PipelineError)
    assert f"no pipeline.toml in {folder}" in str(refused.exception)
    assert list(folder.iterdir()) == []
    CliRunner().invoke(app, INIT)
    assert f"export PIPELINE_HOME={folder}/.pipeline\n" in CliRunner().invoke(app, ["env"]).output


@pytest.mark.parametrize(
    "command",
    [
        "status",
        "status --json",
        "doctor",
        "up",
        "down",
        "jobs ls --json",
        "jobs wait --commit HEAD",
        "jobs inspect --latest",
        "jobs logs --latest",
        "jobs cancel --latest",
        "jobs run",
        "releases ls",
        "releases show r000001-1f3ac9d2",
        "webhooks ls",
        "webhooks deliveries",
        "hub tokens ls",
        "hub gc",
        "receiver dead",
    ],
)
def test_where_no_project_is_no_command_says_that_nothing_is_up(folder: Path, command: str) -> None:
    refused = CliRunner().invoke(app, command.split())
    assert isinstance(refused.exception, PipelineError)
    assert f"no pipeline.toml in {folder}; change to the folder" in str(refused.exception)
    assert refused.stdout == ""
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("known_by", ["pipeline.toml", ".pipeline", "PIPELINE_HOME"])
def test_a_settings_file_or_a_state_folder_is_a_project(
    folder: Path, monkeypatch: pytest.MonkeyPatch, known_by: str
) -> None:
    if known_by == "pipeline.toml":
        (folder / known_by).touch()
    elif known_by == ".pipeline":
        (folder / known_by).mkdir()
    else:
        monkeypatch.setenv(known_by, str(folder / "state"))
    assert CliRunner().invoke(app, ["jobs", "ls"]).output == "No job yet.\n"
    assert "Nothing is up" in CliRunner().invoke(app, ["status"]).output


@pytest.mark.parametrize("detach", [(), ("--detach",)])
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('base_model = "/nonexistent"\n', "/nonexistent is not there"),
        ("port = 7860\n", "port 7860 is set for both the completion server and"),
    ],
)
def test_up_refuses_what_cannot_go_well_and_starts_nothing(
    folder: Path, text: str, words: str, detach: tuple[str, ...]
) -> None:
    (folder / "pipeline.toml").write_text('[[pipelines]]\nname = "a"\ndataset = "o/d"\n' + text)
    refused = CliRunner().invoke(app, ["up", *detach])
    assert isinstance(refused.exception, PipelineError)
    assert words in str(refused.exception)
    assert [each.name for each in folder.iterdir()] == ["pipeline.toml"]
