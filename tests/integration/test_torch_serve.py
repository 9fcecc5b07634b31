"""The torch engine behind the whole server: releases unlike the one before, and SIGKILL."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer
from transformers import GPT2Config

from serving.engines.torch_engine.engine import create_engine
from serving.settings import choose_engine
from serving.tokenizer import load_tokenizer
from serving.weights.release_store import load_release, served_release, set_current
from tests.contract.engine_bench import swap
from tests.contract.test_torch_engine_conformance import torch_release
from tests.serving_fixtures import CONTEXT, byte_tokenizer, echo_app, running
from tests.torch_engine_fixtures import Published, build, expected, llama_config, publish

START_SECONDS = 30
"""Stated: a killed server that is started again answers within it. On two idle cores it takes three
of them, mostly for imports."""


def reversed_tokenizer() -> Tokenizer:
    """The bytes' ids the other way round: the same text is other tokens."""
    content = byte_tokenizer()
    vocabulary = {text: 255 - token_id for text, token_id in content.get_vocab().items()}
    del vocabulary["<eos>"]
    content.model = type(content.model)(vocabulary, [])
    return content


def published(home: Path, config: Any, tokenizer: Tokenizer | None = None) -> Published:
    (home / "files").mkdir(parents=True)
    (tokenizer or byte_tokenizer()).save(str(home / "files" / "tokenizer.json"))
    return publish(build(config), home)


def gathered(pipeline_dir: Path, number: int, home: Path, one: Published) -> Published:
    """The release under the next number, beside the others."""
    release = one.release.model_copy(update={"id": f"r{number:06d}-{one.id.split('-')[1]}"})
    folder = pipeline_dir / release.id
    one.folder.rename(folder)
    (folder / "release.json").write_text(release.model_dump_json())
    return Published(network=one.network, release=load_release(folder), folder=folder)


SHAPE = {"vocab_size": 257, "max_position_embeddings": CONTEXT}


def test_another_tokenizer_or_architecture_is_served_as_after_a_cold_start(tmp_path: Path) -> None:
    """Two releases are resident side by side, so nothing binds the next one to the last."""
    pipeline_dir = tmp_path / "releases"
    pipeline_dir.mkdir()
    kinds = {
        "first": (llama_config(**SHAPE), None),
        "tokenizer": (llama_config(**SHAPE), reversed_tokenizer()),
        "size": (llama_config(**SHAPE, num_hidden_layers=1, tie_word_embeddings=True), None),
        "family": (
            GPT2Config(
                vocab_size=257, n_embd=32, n_layer=1, n_head=2, n_positions=CONTEXT,
                initializer_range=0.3, bos_token_id=None, eos_token_id=None,
            ),
            None,
        ),
    }  # fmt: skip
    releases = [
        gathered(pipeline_dir, number, tmp_path / name, published(tmp_path / name, *kind))
        for number, (name, kind) in enumerate(kinds.items(), start=1)
    ]
    set_current(pipeline_dir, releases[0].id)
    engine = create_engine(num_threads=1, kv_cache_bytes=64 << 20)
    with (
        running(echo_app(pipeline_dir, engine)) as url,
        httpx.Client(base_url=url, timeout=60) as http,
    ):
        for one in (*releases, releases[0]):
            assert swap(http, one.id).json()["result"] == "live"
            body = {"prompt": "Hello", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
            answer = http.post("/v1/completions", json=body).json()
            assert answer["system_fingerprint"] == one.id
            tokenizer = load_tokenizer(one.folder)
            right = expected(one.network, tokenizer.encode("Hello"), 8)
            assert answer["choices"][0]["text"] == tokenizer.decode(right)


@contextlib.contextmanager
def process(pipeline_dir: Path, *phase: str) -> Iterator[subprocess.Popen[str]]:
    started = subprocess.Popen(
        [sys.executable, "-m", "tests.torch_serve_program", str(pipeline_dir), *phase],
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


@pytest.mark.parametrize("phase", [pytest.param("stage", marks=pytest.mark.slow), "commit"])
def test_a_server_killed_in_a_swap_serves_the_old_release_again(tmp_path: Path, phase: str) -> None:
    first, second = (torch_release(tmp_path, seed, tied=True) for seed in (1, 2))
    pipeline_dir = tmp_path / "releases"
    set_current(pipeline_dir, first.id)
    body = {"prompt": "Hello", "max_tokens": 8, "temperature": 0}
    with process(pipeline_dir, phase) as server, ThreadPoolExecutor(1) as pool:
        assert server.stdout is not None
        with httpx.Client(base_url=address(server), timeout=60) as http:
            before = http.post("/v1/completions", json=body).json()
            swapping = pool.submit(swap, http, second.id)
            while server.stdout.readline() != f"in {phase}\n":
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
