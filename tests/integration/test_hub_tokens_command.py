"""`pipeline hub tokens`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner, Result

from pipeline.cli.main import app
from pipeline.paths import Home
from pipeline.tokens import load_tokens
from tests.hub_fixtures import RunningHub, running_hub


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PIPELINE_HOME", str(tmp_path / "state"))
    return Home(tmp_path / "state")


@contextmanager
def hub_of(home: Home) -> Iterator[RunningHub]:
    with running_hub(home.hub_dir) as hub, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIPELINE_HUB__PORT", str(hub.settings.port))
        tokens = load_tokens(home.tokens_file).model_copy(update={"hub": hub.token})
        home.tokens_file.write_text(tokens.model_dump_json())
        yield hub


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["hub", "tokens", *arguments])


def asked(hub: RunningHub, token: str) -> int:
    headers = {"Authorization": f"Bearer {token}"}
    return httpx.get(f"{hub.url}/api/datasets/local/facts", headers=headers).status_code


def test_tokens_are_created_listed_and_revoked(home: Home) -> None:
    with hub_of(home) as hub:
        assert "No token yet" in run("ls").stdout
        hub.create_dataset("local/facts")
        token = run("create", "ada", "--role", "write").stdout.strip()
        assert asked(hub, token) == 200
        assert run("create", "ada").exit_code == 1
        listed = run("ls").stdout
        assert "ada   write" in listed and "hf_" not in listed
        assert run("revoke", "ada").stdout.strip() == "revoked ada"
        assert asked(hub, token) == 401
        assert run("revoke", "ada").exit_code == 1


def test_without_a_hub_no_token_is_made(home: Home) -> None:
    refused = run("create", "ada")
    assert refused.exit_code == 1 and "cannot be reached" in str(refused.exception)


def test_a_name_that_is_none_touches_no_other_token(home: Home) -> None:
    with hub_of(home) as hub:
        token = run("create", "down").stdout.strip()
        hub.create_dataset("local/facts")
        for name in ("", "down?role=write", "down#", "a/b", "..", "down%3F"):
            for command in ("create", "revoke"):
                refused = run(command, name)
                assert refused.exit_code == 1
                assert f"{name!r} is not a valid name for a token" in str(refused.exception)
        assert asked(hub, token) == 200
