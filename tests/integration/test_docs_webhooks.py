"""The blocks of docs/webhooks.md, run as they stand there."""

import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import nbformat
import pytest
from nbclient import NotebookClient
from starlette.testclient import TestClient

from jobs.store import JobStore
from tests.hub_fixtures import SECRET_KEY, RunningHub, running_hub
from tests.ports import free_port
from tests.receiver_fixtures import no_secret_in_the_environment  # noqa: F401
from tests.receiver_payloads import (
    GITHUB_PUSH,
    NEW,
    body_of,
    dataset_update,
    hmac_hex,
)
from tests.receiver_scripts import ROOT, on_port, running

PAGE = (ROOT / "docs" / "webhooks.md").read_text()
PORT = "7861"
SECRET = {"X-Webhook-Secret": "my-secret"}


def _blocks() -> dict[str, list[str]]:
    found = defaultdict(list)
    for heading, section in re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S):
        for code in re.findall(r"^```\w+\n(.*?)^```", section, re.M | re.S):
            found[heading].append(code)
    return found


BLOCKS = _blocks()
SECTIONS: set[str] = set()


def section(heading: str) -> Callable[[Any], Any]:
    """The test below runs the blocks of that section, which it must unpack to the last."""
    SECTIONS.add(heading)
    return lambda test: test


def post(url: str, headers: dict[str, str] | None = None, **payload: Any) -> Any:
    answer = httpx.post(url, json=dataset_update(**payload), headers=headers, timeout=30)
    return answer.json() if answer.status_code < 300 else answer.status_code


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """One with the dataset `local/answers`, and an environment whose `pipeline` is its own."""
    with running_hub(tmp_path / "hub") as hub:
        hub.create_dataset("local/answers")
        home = tmp_path / ".pipeline"
        home.mkdir()
        tokens = {"hub": hub.token, "admin": "a", "webhook": "w", "key": SECRET_KEY.decode()}
        (home / "tokens.json").write_text(json.dumps(tokens))
        commands = tmp_path / "bin"
        commands.mkdir()
        for name, module in (("pipeline", "-m pipeline"), ("python", "")):
            (commands / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {module} "$@"\n')
            (commands / name).chmod(0o755)
        for name, value in {
            "HF_ENDPOINT": hub.url,
            "HF_TOKEN": hub.token,
            "PATH": f"{commands}:{os.environ['PATH']}",
            "PIPELINE_HOME": str(home),
            "PIPELINE_SETTINGS": str(tmp_path / "pipeline.toml"),
            "PIPELINE_HUB__PORT": str(hub.settings.port),
            "PYTHONPATH": str(ROOT),
        }.items():
            monkeypatch.setenv(name, value)
        yield hub


def run(*command: str, given: str = "") -> str:
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@section("From the command line")
def test_a_webhooks_life_in_the_shell(hub: RunningHub) -> None:
    [script] = BLOCKS["From the command line"]
    printed = run("bash", "-c", "set -euo pipefail\n" + script, given="y\n")
    for expected in ("enabled", '"domains": [', "is updated", "is disabled", "is deleted"):
        assert expected in printed
    assert hub.api.list_webhooks() == []


@section("From Python")
def test_a_webhooks_life_in_python(hub: RunningHub) -> None:
    [code] = BLOCKS["From Python"]
    printed = run(sys.executable, "-c", code).splitlines()
    assert printed[0].endswith(" enabled http://127.0.0.1:7861/webhooks/trigger_training")
    assert printed[1] == "disabled"
    assert hub.api.list_webhooks() == []


@section("A receiver")
def test_a_receiver(tmp_path: Path) -> None:
    script, greeting, call = BLOCKS["A receiver"]
    port = free_port()
    with running(tmp_path, on_port(script, port)) as (_, printed, _process):
        assert "\n".join(printed).strip() == greeting.strip().replace(PORT, str(port))
        answer = json.loads(run("bash", "-c", call.replace(PORT, str(port))))
    assert answer == {"training": "local/answers at 5f1c0de"}


@section("In a notebook")
def test_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [first] = BLOCKS["In a notebook"]
    again = first.replace("hello {", "good morning {") + (
        "\n@webhook_endpoint\nasync def goodbye(payload: WebhookPayload):\n"
        "    return {'message': 'goodbye'}\n\nurl = hello.launch()\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    call = (
        "import httpx\n"
        "async def post(name):\n"
        "    async with httpx.AsyncClient() as client:\n"
        f"        url_of = f'{{url}}/webhooks/{{name}}'\n"
        f"        answer = await client.post(url_of, json={dataset_update()})\n"
        "    return answer.status_code, answer.json()\n"
    )
    cells = [
        on_port("", free_port()),
        first,
        call + "await post('hello')",
        "await post('goodbye')",
        again,
        "await post('hello')",
        "await post('goodbye')",
        "list(__import__('receiver.server').server._shared_server().registered_webhooks)",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    NotebookClient(notebook, timeout=60, resources={"metadata": {"path": str(tmp_path)}}).execute()
    results = [
        output["data"]["text/plain"]
        for cell in notebook.cells
        for output in cell.outputs
        if output["output_type"] == "execute_result"
    ]
    assert results == [
        "(200, {'message': 'hello acme/answers'})",
        "(404, {'error': 'Not Found'})",
        "(200, {'message': 'good morning acme/answers'})",
        "(200, {'message': 'goodbye'})",
        "['/webhooks/hello', '/webhooks/goodbye']",
    ]


@section("A server of your own")
def test_a_server_of_ones_own(tmp_path: Path) -> None:
    script, embedding = BLOCKS["A server of your own"]
    with running(tmp_path, script.replace(PORT, str(free_port()))) as (url, _, _process):
        assert httpx.get(url).text == "<h1>What has been retrained</h1>"
        assert post(f"{url}/webhooks/say_hello", SECRET) == {"message": "hello"}
        assert post(f"{url}/webhooks/say_hello") == 401

    module: dict[str, Any] = {}
    exec(embedding, module)
    with TestClient(module["app"], base_url="http://localhost") as client:
        answer = client.post("/hooks/webhooks/hello", json=dataset_update(), headers=SECRET)
        assert answer.json() == {"message": "hello"}


@section("A secret")
def test_a_secret(tmp_path: Path) -> None:
    [script] = BLOCKS["A secret"]
    code = on_port(script, free_port())
    with running(tmp_path, code, WEBHOOK_SECRET="my-secret") as (url, printed, _):
        assert "have no secret" not in "\n".join(printed)
        for route, secret, answer in (
            ("with_the_environments", "my-secret", {"proven": True}),
            ("with_its_own", "new-secret", {"proven": True}),
            ("with_its_own", "old-secret", {"proven": True}),
            ("with_its_own", "my-secret", 403),
        ):
            assert post(f"{url}/webhooks/{route}", {"X-Webhook-Secret": secret}) == answer


@section("Deliveries that must not be lost")
def test_a_receiver_that_launches_jobs(tmp_path: Path) -> None:
    [script] = BLOCKS["Deliveries that must not be lost"]
    (tmp_path / "index.py").write_text("import os; print(os.environ['WEBHOOK_PAYLOAD'])")
    file = tmp_path / "state" / "jobs" / "jobs.sqlite"
    file.parent.mkdir(parents=True)
    with JobStore.open(file) as store:
        with running(
            tmp_path, on_port(script, free_port()), PIPELINE_HOME=str(tmp_path / "state")
        ) as (url, _, _process):
            answer = post(f"{url}/webhooks/index")
        [job] = store.list()
        assert answer["job"] == job.id
        assert job.spec.command == (sys.executable, str(tmp_path / "index.py"))
        assert job.payload is not None and job.payload["repo"]["name"] == "acme/answers"


@section("GitHub, Gitea, GitLab, Standard Webhooks")
def test_a_push_of_github(tmp_path: Path) -> None:
    [script] = BLOCKS["GitHub, Gitea, GitLab, Standard Webhooks"]
    body = body_of(GITHUB_PUSH)
    signature = {"X-Hub-Signature-256": f"sha256={hmac_hex('my-secret', body)}"}
    with running(tmp_path, on_port(script, free_port())) as (url, _, _process):

        def deliver(event: str, headers: dict[str, str]) -> httpx.Response:
            headers = {"X-GitHub-Event": event, **headers}
            return httpx.post(f"{url}/webhooks/on_push", content=body, headers=headers)

        pushed = f"Codertocat/Hello-World refs/heads/main {NEW}"
        assert deliver("push", signature).json() == {"pushed": pushed}
        assert deliver("ping", signature).json() == {"pong": True}


def test_no_block_is_left_out() -> None:
    assert set(BLOCKS) == SECTIONS
