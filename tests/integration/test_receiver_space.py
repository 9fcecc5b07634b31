"""`pipeline receiver deploy` and `pipeline receiver app`, with a hub that stores the Space."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from huggingface_hub import metadata_load
from huggingface_hub.errors import RepositoryNotFoundError

from pipeline import space_run
from pipeline.errors import PipelineError
from pipeline.tokens import Tokens, load_tokens
from tests.hub_fixtures import RunningHub, running_hub
from tests.ports import free_port
from tests.receiver_payloads import dataset_update
from tests.receiver_scripts import ROOT

APP = """
import receiver
from receiver import WebhookPayload, WebhooksServer

app = WebhooksServer()

@app.add_webhook("/say_hello")
async def hello(payload: WebhookPayload):
    return {"hello": payload.repo.name, "package": receiver.__file__}

app.launch()
"""


@dataclass(frozen=True, kw_only=True)
class Stack:
    hub: RunningHub
    tokens: Tokens
    env: dict[str, str]

    def start(self, *arguments: str, **more: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-m", "pipeline", "receiver", *arguments],
            env=self.env | more,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *arguments: str, code: int = 0, **more: str) -> str:
        """What the command printed."""
        with self.start(*arguments, **more) as process:
            printed, _ = process.communicate(timeout=60)
        assert process.returncode == code, printed
        assert self.tokens.webhook not in printed
        return printed


def last_json(printed: str) -> Any:
    """Of --json; the Hub's client may have said something before."""
    return json.loads(printed.splitlines()[-1])


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    home = tmp_path_factory.mktemp("home")
    tokens = load_tokens(home / "tokens.json")
    with running_hub(home / "hub", token=tokens.hub, secret_key=tokens.key.encode()) as hub:
        env = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PIPELINE_", "HF_", "GRADIO_", "SPACE_"))
        }
        env |= {
            "PIPELINE_HOME": str(home),
            "PIPELINE_HUB__PORT": str(hub.settings.port),
            "PIPELINE_SETTINGS": str(home / "pipeline.toml"),
            "PYTHONPATH": str(ROOT),
            "HF_HOME": str(home / "hf"),
        }
        yield Stack(hub=hub, tokens=tokens, env=env)


@contextmanager
def app_of(
    stack: Stack, *arguments: str, **more: str
) -> Iterator[tuple[str, list[str], "subprocess.Popen[str]"]]:
    """The local URL, what was printed, and the process."""
    port = free_port()
    with stack.start("app", *arguments, "--port", str(port), **more) as process:
        try:
            assert process.stdout is not None
            printed = []
            for line in process.stdout:
                printed.append(line.rstrip())
                if " runs at " in line:
                    break
            url = f"http://127.0.0.1:{port}"
            assert printed[-1:] and printed[-1].endswith(f" runs at {url}/"), printed
            yield url, printed, process
        finally:
            process.kill()


def test_deploy_makes_the_space_and_a_second_time_changes_nothing(
    stack: Stack, tmp_path: Path
) -> None:
    printed = stack.run("deploy", "ada/made", "--dry-run")
    assert "would be" in printed
    with pytest.raises(RepositoryNotFoundError):
        stack.hub.api.space_info("ada/made")

    first = last_json(stack.run("deploy", "ada/made", "--json"))
    assert first["routes"] == ["/webhooks/on_push"]
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
    assert list(stack.hub.api.get_space_secrets("ada/made")) == ["WEBHOOK_SECRET"]

    again = last_json(stack.run("deploy", "ada/made", "--json"))
    assert again["commit"] == first["commit"]


def test_a_folder_is_deployed_without_what_must_stay_here(stack: Stack, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    (folder / ".git").mkdir(parents=True)
    (folder / ".git" / "config").write_text("")
    (folder / ".env").write_text("WEBHOOK_SECRET=own-s3cret\n")
    (folder / "app.py").write_text("from huggingface_hub import webhook_endpoint\n")
    (folder / "README.md").write_text("# Mine\n")
    (folder / "requirements.txt").write_text("pandas\n")
    secret_file = ("--secret-file", str(folder / ".env"))
    deployed = last_json(stack.run("deploy", "ada/mine", str(folder), *secret_file, "--json"))
    assert deployed["files"] == ["README.md", "app.py", "requirements.txt"]
    api = stack.hub.api
    read = api.hf_hub_download("ada/mine", "README.md", repo_type="space", local_dir=tmp_path / "a")
    assert Path(read).read_text().endswith("---\n# Mine\n")
    assert metadata_load(read) is not None

    (folder / "app.py").write_text(APP)
    (folder / "requirements.txt").unlink()
    changed = last_json(stack.run("deploy", "ada/mine", str(folder), *secret_file, "--json"))
    assert changed["commit"] != deployed["commit"]
    assert changed["routes"] == ["/webhooks/say_hello"]
    assert "receiver/server.py" in changed["files"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_app_runs_here_as_in_a_space(
    stack: Stack, tmp_path: Path, number: signal.Signals
) -> None:
    (tmp_path / "app.py").write_text(APP)
    stack.run("deploy", "ada/hello", str(tmp_path))
    with app_of(stack, "ada/hello", WEBHOOK_SECRET="of-the-shell") as (url, printed, process):
        assert "  - POST https://ada-hello.hf.space/webhooks/say_hello" in printed
        secret = {"X-Webhook-Secret": stack.tokens.webhook}
        answer = httpx.post(f"{url}/webhooks/say_hello", json=dataset_update(), headers=secret)
        assert answer.json()["hello"] == "acme/answers"
        # Its own copy of the package, as in a Space, where no other is installed.
        assert answer.json()["package"].endswith("/space/receiver/__init__.py")
        for wrong in ({}, {"X-Webhook-Secret": "of-the-shell"}):
            answer = httpx.post(f"{url}/webhooks/say_hello", json=dataset_update(), headers=wrong)
            assert answer.status_code in (401, 403)
        process.send_signal(number)
        assert process.wait(30) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(url)


def test_a_signal_that_comes_while_the_app_is_started_stops_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Signalled(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            os.kill(os.getpid(), signal.SIGTERM)

    (tmp_path / "app.py").write_text("import sys, time\ntime.sleep(5)\nsys.exit(3)\n")
    monkeypatch.setattr(subprocess, "Popen", Signalled)
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        code = space_run.run_app(tmp_path / "app.py", os.environ, free_port(), lambda: None)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert code == 0


def test_an_app_that_ignores_the_signal_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    (tmp_path / "app.py").write_text(
        "import pathlib, signal, socket, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"with socket.create_server(('127.0.0.1', {port})):\n"
        "    time.sleep(30)\n"
        "pathlib.Path('has-ended-by-itself').touch()\n"
    )
    monkeypatch.setattr(space_run, "KILL_AFTER_SECONDS", 0.2)
    code = space_run.run_app(
        tmp_path / "app.py", os.environ, port, lambda: os.kill(os.getpid(), signal.SIGTERM)
    )
    assert code == 0
    assert not (tmp_path / "has-ended-by-itself").exists()


def test_a_folder_runs_with_the_secret_of_a_file(stack: Stack, tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP)
    (tmp_path / "secrets").write_text("WEBHOOK_SECRET=s3cret\n")
    with app_of(stack, str(tmp_path), "--secret-file", str(tmp_path / "secrets")) as (url, _, _):
        secret = {"X-Webhook-Secret": "s3cret"}
        answer = httpx.post(f"{url}/webhooks/say_hello", json=dataset_update(), headers=secret)
        assert answer.json()["package"] == str(ROOT / "receiver" / "__init__.py")


@pytest.mark.parametrize("yaml", ["a: [", "only a text"])
def test_front_matter_that_cannot_be_read_is_named(tmp_path: Path, yaml: str) -> None:
    (tmp_path / "README.md").write_text(f"---\n{yaml}\n---\n")
    with pytest.raises(PipelineError, match=r"the front matter of .*README\.md cannot be read"):
        space_run.app_file(tmp_path)


def test_what_is_missing_is_said(stack: Stack, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "there is no app.py in" in stack.run("app", str(empty), code=1)
    assert "there is no app.py in" in stack.run("deploy", "ada/x", str(empty), code=1)
    assert "write OWNER/NAME" in stack.run("deploy", "nothing", code=1)
    assert "there is no Space ada/none" in stack.run("app", "ada/none", code=1)
    (empty / "app.py").write_text("def")
    assert "is not a Python script" in stack.run("deploy", "ada/x", str(empty), code=1)
    (empty / "secrets").write_text("OTHER=1\n")
    printed = stack.run("deploy", "ada/x", "--secret-file", str(empty / "secrets"), code=1)
    assert "has no line WEBHOOK_SECRET=VALUE" in printed
    (empty / "app.py").write_text(APP)
    port = ("--port", str(free_port()))
    assert "there is no secret for /webhooks/say_hello" in stack.run(
        "app", str(empty), *port, code=1
    )
    taken = ("--port", str(stack.hub.settings.port))
    assert "is in use; choose another one with --port" in stack.run(
        "app", str(empty), *taken, code=1
    )
    elsewhere = ("--endpoint", stack.hub.url)
    printed = stack.run("deploy", "ada/x", *elsewhere, code=1, HF_TOKEN="hf_wrong")
    assert "answered 401" in printed and "may write there" in printed
