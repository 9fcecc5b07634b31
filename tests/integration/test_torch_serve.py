"""The torch engine behind the whole server, and SIGKILL."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from serving.engines.settings import choose_engine
from serving.weights.release_store import served_release, set_current
from tests.contract.engine_bench import swap
from tests.contract.test_torch_engine_conformance import torch_release

START_SECONDS = 30
"""Stated: a killed server that is started again answers within it. On two idle cores it takes three
of them, mostly for imports."""


@contextlib.contextmanager
def process(pipeline_dir: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    started = subprocess.Popen(
        [sys.executable, "-m", "tests.torch_serve_program", str(pipeline_dir), *options],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    try:
        yield started
    finally:
        started.kill()
        started.communicate()


def address(server: subprocess.Popen[str]) -> str:
    assert server.stdout is not None
    return server.stdout.readline().split()[-1]


def test_a_server_killed_in_a_swap_serves_the_old_release_again(tmp_path: Path) -> None:
    first, second = (torch_release(tmp_path, seed, tied=True) for seed in (1, 2))
    pipeline_dir = tmp_path / "releases"
    set_current(pipeline_dir, first.id)
    body = {"prompt": "Hello", "max_tokens": 8, "temperature": 0}
    with process(pipeline_dir, "stops") as server, ThreadPoolExecutor(1) as pool:
        assert server.stdout is not None
        with httpx.Client(base_url=address(server), timeout=60) as http:
            before = http.post("/v1/completions", json=body).json()
            swapping = pool.submit(swap, http, second.id)
            while server.stdout.readline() != "in commit\n":
                assert server.poll() is None
            server.kill()
            with pytest.raises(httpx.HTTPError):
                swapping.result()
    assert served_release(pipeline_dir) == pipeline_dir / first.id
    started = time.monotonic()
    with (
        process(pipeline_dir) as server,
        httpx.Client(base_url=address(server), timeout=60) as http,
    ):
        assert server.stdout is not None
        choice = choose_engine("auto")
        said = f"engine {choice.name} ({choice.reason}); answers: {first.id} from "
        assert server.stdout.readline().startswith(said)
        after = http.post("/v1/completions", json=body).json()
        assert time.monotonic() - started < START_SECONDS
        assert (after["system_fingerprint"], after["choices"]) == (first.id, before["choices"])
        assert swap(http, second.id).json()["result"] == "live"
