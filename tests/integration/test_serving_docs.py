"""The Python blocks of docs/serving.md run as they stand there."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx

from serving.weights.releases import list_releases, set_current
from tests.serving_fixtures import echo_release, tiny_llama

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "serving.md").read_text(), re.S)
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


def test_the_server_block_serves(tmp_path: Path) -> None:
    pipeline_dir = tmp_path / ".pipeline" / "releases" / "answers"
    release = echo_release(pipeline_dir, 1)
    set_current(pipeline_dir, release.id)
    code = BLOCKS[0].replace("port=8000", "port=0")  # whatever else runs on this machine
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().split()[-1]
        health = httpx.get(f"{url}/health", timeout=30).json()
        assert health["release"] == release.id
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate()


def test_the_publishing_block_publishes(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path / "my-checkpoint")
    subprocess.run([sys.executable, "-c", BLOCKS[1]], cwd=tmp_path, env=ENVIRONMENT, check=True)
    assert len(list_releases(tmp_path / ".pipeline" / "releases" / "answers")) == 1
