"""`pipeline init` and `pipeline env`: which folder they mean; what `pipeline up` refuses; what the
other commands say in a folder of no project. A demo that cannot start leaves nothing behind."""

import os
import shlex
import signal
import socket
import tempfile
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pipeline.cli.main import app
from pipeline.errors import PipelineError
from pipeline.paths import Home
from pipeline.retrain.sources import token_of_shell
from pipeline.settings import PipelineSettings, load_settings
from pipeline.tokens import load_tokens
from tests.ports import free_ports

INIT = ("init", "--name", "notes", "--dataset", "local/notes")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("PIPELINE_HOME", "PIPELINE_SETTINGS", "PIPELINE_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def project(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project in a folder of its own, which becomes the working folder."""
    (folder / name).mkdir()
    monkeypatch.chdir(folder / name)
    written = CliRunner().invoke(app, ["init", "--name", name, "--dataset", f"local/{name}"])
    assert written.output.endswith("with: pipeline up\n"), written.output
    return folder / name


def evaluate_env(monkeypatch: pytest.MonkeyPatch) -> None:
    """eval "$(pipeline env)" in this process."""
    for line in CliRunner().invoke(app, ["env"]).stdout.splitlines():
        name, _, value = shlex.split(line)[1].partition("=")
        monkeypatch.setenv(name, value)


def test_the_folder_wins_over_what_env_has_set_in_this_shell(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = project(folder, "one", monkeypatch)
    evaluate_env(monkeypatch)
    of_one = load_tokens(one / ".pipeline" / "tokens.json").hub
    (folder / "clone-elsewhere").mkdir()
    monkeypatch.chdir(folder / "clone-elsewhere")
    assert Home.find().root == one / ".pipeline", "no project here, so that of the shell"

    two = project(folder, "two", monkeypatch)
    for inside in (two, two / "clone" / "rows"):
        inside.mkdir(parents=True, exist_ok=True)
        monkeypatch.chdir(inside)
        assert Home.find().root == two / ".pipeline"
        assert [each.name for each in load_settings().pipelines] == ["two"]
    down = CliRunner().invoke(app, ["down"])
    assert down.stderr == f"stack {two}/.pipeline, pipeline two\n"
    assert f"nothing is up in {two}/.pipeline" in str(down.exception)
    of_two = load_tokens(two / ".pipeline" / "tokens.json").hub
    assert token_of_shell(os.environ, of_two) is None, "one's token is not the user's own"
    evaluate_env(monkeypatch)
    assert os.environ["HF_TOKEN"] == of_two != of_one
    monkeypatch.setenv("HF_TOKEN", "hf_mine")
    assert token_of_shell(os.environ, of_two) == "hf_mine"

    monkeypatch.setenv("PIPELINE_HOME", str(one / ".pipeline"))
    monkeypatch.setenv("PIPELINE_SETTINGS", str(one / "pipeline.toml"))
    assert Home.find().root == one / ".pipeline", "what a person sets wins"
    assert [each.name for each in load_settings().pipelines] == ["one"]


def test_every_command_that_changes_something_names_its_stack(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = project(folder, "notes", monkeypatch)
    named = f"stack {notes}/.pipeline, pipeline notes\n"
    for command in (
        "jobs cancel j000001",
        "releases rollback",
        "releases swap r000001-00000000",
        "releases rm r000001-00000000",
        "releases prune --pipeline notes",
        "webhooks disable w1",
        "hub tokens revoke t1",
    ):
        assert CliRunner().invoke(app, command.split()).stderr.startswith(named), command
    for command in ("status", "jobs ls", "releases ls", "env", "releases publish x --json"):
        assert named not in CliRunner().invoke(app, command.split()).stderr, command
    (notes / "pipeline.toml").write_text("[[pipelines]")
    assert "pipeline none" in CliRunner().invoke(app, ["releases", "rollback"]).stderr


def test_init_writes_twenty_lines_of_which_three_matter(folder: Path) -> None:
    CliRunner().invoke(app, INIT)
    text = (folder / "pipeline.toml").read_text()
    assert len(text.splitlines()) <= 20 and "`pipeline settings`" in text
    [told] = tomllib.loads(text)["pipelines"]
    assert told == {"name": "notes", "dataset": "local/notes", "base_model": "preset:tiny"}
    [pipeline] = load_settings().pipelines
    assert pipeline == PipelineSettings.model_validate(told)
    elsewhere = ("--dataset-endpoint", "https://huggingface.co", "--base-model", "me/base")
    CliRunner().invoke(app, [*INIT, *elsewhere, "--force"])
    [pipeline] = load_settings().pipelines
    assert pipeline.dataset_endpoint == "https://huggingface.co"
    assert pipeline.base_model == "me/base"


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
        "env",
    ],
)
def test_where_no_project_is_no_command_says_that_nothing_is_up(folder: Path, command: str) -> None:
    refused = CliRunner().invoke(app, command.split())
    assert isinstance(refused.exception, PipelineError)
    assert f"no pipeline.toml in {folder} or above it; change to the folder" in str(
        refused.exception
    )
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


def test_a_busy_port_is_told_with_its_variable_and_no_folder_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    # What the demo sets for its own process, and those that stay as they were.
    for name in ("HOME", "SETTINGS", "SERVING__ENGINE"):
        monkeypatch.setenv(f"PIPELINE_{name}", "")
    names = ("HUB__PORT", "RECEIVER__PORT", "SERVING__PORT", "JOBS__METRICS_PORT")
    for name, port in zip(names, free_ports(len(names)), strict=True):
        monkeypatch.setenv(f"PIPELINE_{name}", str(port))
    with socket.create_server(("127.0.0.1", 0)) as busy:
        monkeypatch.setenv("PIPELINE_HUB__PORT", str(busy.getsockname()[1]))
        refused = CliRunner().invoke(app, ["demo"])
    assert isinstance(refused.exception, PipelineError)
    assert "PIPELINE_HUB__PORT=…" in str(refused.exception)
    assert str(tmp_path) not in str(refused.exception)
    assert list(tmp_path.iterdir()) == []
