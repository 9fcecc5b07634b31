"""The blocks of docs/serving.md run as they stand there."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import httpx

from serving.weights.release_store import list_releases, set_current
from tests.ports import free_ports
from tests.serving_fixtures import byte_tokenizer, network_release, server_process, tiny_llama

ROOT = Path(__file__).parents[2]
DOCS = (ROOT / "docs" / "serving.md").read_text()
SERVER, ASKING, PUBLISHING = re.findall(r"```python\n(.*?)```", DOCS, re.S)
# Each is run, the last one by tests/contract/test_lm_eval.py; one more does not unpack.
SERVING, EVALUATING = re.findall(r"```sh\n(.*?)```", DOCS, re.S)
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


def test_the_server_block_serves_and_the_client_block_asks(tmp_path: Path) -> None:
    pipeline_dir = tmp_path / ".pipeline" / "releases" / "answers"
    release = network_release(pipeline_dir, 1)
    set_current(pipeline_dir, release.id)
    code = SERVER.replace("port=8000", "port=0")  # whatever else runs on this machine
    with server_process("-c", code, cwd=tmp_path, env=ENVIRONMENT) as (url, process):
        assert process.stdout is not None
        health = httpx.get(f"{url}/health", timeout=30).json()
        assert health["release"] == release.id
        assert process.stdout.readline().startswith(f"engine torch; answers: {release.id}")
        asking = [sys.executable, "-c", ASKING.replace("http://127.0.0.1:8000", url)]
        done = subprocess.run(asking, env=ENVIRONMENT, capture_output=True, text=True, check=True)
        assert done.stdout.endswith(f" by {release.id}\n")


def test_the_publishing_block_publishes(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path / "my-checkpoint")
    subprocess.run([sys.executable, "-c", PUBLISHING], cwd=tmp_path, env=ENVIRONMENT, check=True)
    assert len(list_releases(tmp_path / ".pipeline" / "releases" / "answers")) == 1


def test_the_command_serves_a_checkpoint(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path / "my-checkpoint")
    byte_tokenizer().save(str(tmp_path / "my-checkpoint" / "tokenizer.json"))
    before = sorted((tmp_path / "my-checkpoint").iterdir())
    program, *arguments = shlex.split(SERVING)
    assert program == "pipeline"
    arguments[arguments.index("--port") + 1] = str(free_ports(1)[0])
    command = ("-m", "pipeline", *arguments)
    with server_process(*command, cwd=tmp_path, env=ENVIRONMENT) as (url, _):
        assert httpx.get(f"{url}/v1/models", timeout=30).json()["data"][0]["id"] == "my-checkpoint"
    assert sorted((tmp_path / "my-checkpoint").iterdir()) == before
