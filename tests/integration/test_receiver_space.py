"""`pipeline receiver deploy`, with a hub that stores the Space, but takes no secret of it."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
from huggingface_hub import HfApi, metadata_load
from typer.testing import CliRunner

from pipeline.cli.main import app
from pipeline.tokens import Tokens, load_tokens
from tests.hub_fixtures import TOKEN, RunningHub, running_hub

OTHERS = ("PIPELINE_", "HF_", "GRADIO_", "SPACE_")
"""How variables begin that the command would read."""


@dataclass(frozen=True, kw_only=True)
class Stack:
    hub: RunningHub
    tokens: Tokens
    env: dict[str, str | None]

    def deploy(self, *arguments: str, code: int = 0, **more: str) -> str:
        """What the command printed, or why it did nothing."""
        command = ["receiver", "deploy", "--endpoint", self.hub.url, *arguments]
        result = CliRunner().invoke(app, command, env=self.env | more)
        printed = result.output + str(result.exception or "")
        assert result.exit_code == code, printed
        assert self.tokens.webhook not in printed
        return printed


def last_json(printed: str) -> Any:
    """Of --json; the Hub's client may have said something before."""
    return json.loads(printed.splitlines()[-1])


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    home = tmp_path_factory.mktemp("home")
    tokens = load_tokens(home / "tokens.json")
    with running_hub(home / "hub") as hub:
        unset = dict.fromkeys(name for name in os.environ if name.startswith(OTHERS))
        env = unset | {
            "PIPELINE_HOME": str(home),
            "PIPELINE_SETTINGS": str(home / "pipeline.toml"),
            "HF_TOKEN": TOKEN,
        }
        yield Stack(hub=hub, tokens=tokens, env=env)


@pytest.fixture
def add_secret() -> Iterator[Mock]:
    with patch.object(HfApi, "add_space_secret") as add_secret:
        yield add_secret


def test_deploy_makes_the_space_and_a_second_time_changes_nothing(
    stack: Stack, tmp_path: Path, add_secret: Mock
) -> None:
    first = last_json(stack.deploy("ada/made", "--json"))
    info = stack.hub.api.space_info("ada/made")
    assert info.sha == first["commit"]
    files = set(stack.hub.api.list_repo_files("ada/made", repo_type="space"))
    assert {"app.py", "README.md", "requirements.txt", "receiver/server.py"} <= files
    assert {file for file in files if file.startswith("serving/")} > {"serving/http/server.py"}
    assert not any("torch_engine" in file or "__pycache__" in file for file in files)
    readme = stack.hub.api.hf_hub_download(
        "ada/made", "README.md", repo_type="space", local_dir=tmp_path
    )
    card = metadata_load(readme)
    assert card is not None
    assert (card["sdk"], card["app_file"]) == ("gradio", "app.py")
    assert add_secret.call_args.args == ("ada/made", "WEBHOOK_SECRET", stack.tokens.webhook)

    again = last_json(stack.deploy("ada/made", "--json"))
    assert again["commit"] == first["commit"]


def test_a_folder_is_deployed_without_what_must_stay_here(
    stack: Stack, tmp_path: Path, add_secret: Mock
) -> None:
    folder = tmp_path / "mine"
    (folder / ".git").mkdir(parents=True)
    (folder / ".git" / "config").write_text("")
    (folder / ".env").write_text("WEBHOOK_SECRET=own-s3cret\n")
    (folder / "app.py").write_text("from huggingface_hub import webhook_endpoint\n")
    (folder / "README.md").write_text("# Mine\n")
    (folder / "requirements.txt").write_text("pandas\n")
    secret_file = ("--secret-file", str(folder / ".env"))
    deployed = last_json(stack.deploy("ada/mine", str(folder), *secret_file, "--json"))
    assert add_secret.call_args.args == ("ada/mine", "WEBHOOK_SECRET", "own-s3cret")
    assert {"README.md", "app.py", "requirements.txt"} <= {*deployed["files"]}
    assert not any(file.startswith(".") for file in deployed["files"])
    api = stack.hub.api
    read = api.hf_hub_download("ada/mine", "README.md", repo_type="space", local_dir=tmp_path / "a")
    assert Path(read).read_text().endswith("---\n# Mine\n")
    assert metadata_load(read) is not None


def test_what_is_missing_is_said(stack: Stack, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "there is no app.py in" in stack.deploy("ada/x", str(empty), code=1)
    assert "write OWNER/NAME" in stack.deploy("nothing", code=1)
    (empty / "secrets").write_text("OTHER=1\n")
    printed = stack.deploy("ada/x", "--secret-file", str(empty / "secrets"), code=1)
    assert "has no line WEBHOOK_SECRET=VALUE" in printed
    (empty / "app.py").touch()
    printed = stack.deploy("ada/x", code=1, HF_TOKEN="hf_wrong")
    assert "refused the token (401" in printed and "that may do this" in printed
    assert "/secrets is not supported by this hub" in stack.deploy("ada/x", code=1)
