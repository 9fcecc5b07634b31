"""A swap reads what changed, and hardly anything else."""

import logging
import os
from pathlib import Path

import httpx
import pytest

from serving.engines.torch_engine.engine import create_engine
from serving.weights.release_store import set_current
from tests.contract.engine_bench import swap
from tests.contract.test_torch_engine_conformance import torch_release
from tests.serving_fixtures import echo_app, running
from tests.swap_bytes import bytes_read, staged_bytes, stored_bytes, with_changed

LARGE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4}

CHANGED = (
    "model.layers.0.self_attn.o_proj.weight",
    "model.layers.1.self_attn.o_proj.weight",
    "model.layers.2.mlp.down_proj.weight",
    "model.layers.3.input_layernorm.weight",
)
"""One tensor in ten. None of them is fused with others, which would be read with it."""


def test_a_tenth_of_the_tensors_is_read_with_little_besides(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    first = torch_release(tmp_path, 1, tied=False, max_shard_bytes=400_000, **LARGE)
    pipeline_dir = tmp_path / "releases"
    assert 0.1 <= len(CHANGED) / len(first.tensors) < 0.11
    second, changed = with_changed(pipeline_dir, first, CHANGED)
    third, _ = with_changed(pipeline_dir, second, CHANGED)
    set_current(pipeline_dir, first.id)
    engine = create_engine(num_threads=1, kv_cache_bytes=64 << 20)
    with (
        running(echo_app(pipeline_dir, engine)) as url,
        httpx.Client(base_url=url, timeout=60) as http,
    ):
        # Once before, for what is imported at the first swap.
        assert swap(http, second.id).json()["result"] == "live"
        before = bytes_read(os.getpid())
        assert swap(http, third.id).json()["result"] == "live"
        plainly = bytes_read(os.getpid()) - before
        mapped = staged_bytes(caplog, third.id)
    assert mapped == changed
    assert mapped + plainly <= 0.15 * stored_bytes(pipeline_dir, third)
