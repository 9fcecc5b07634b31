"""A release and those that differ from it, and a condition to wait for."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from serving.weights.index import read_header
from tests.torch_engine_fixtures import (
    Published,
    build,
    llama_config,
    publish,
)

Change = Callable[[dict[str, torch.Tensor]], None]


@pytest.fixture
def first(tmp_path: Path) -> Published:
    return publish(build(llama_config(tie_word_embeddings=True)), tmp_path)


def changed(network: Any, home: Path, change: Change, **options: Any) -> Published:
    other = build(network.config, dtype=network.dtype)
    other.load_state_dict(network.state_dict())
    with torch.no_grad():
        change(dict(other.named_parameters()))
    return publish(other, home, **options)


def nudge(*names: str) -> Change:
    def change(parameters: dict[str, torch.Tensor]) -> None:
        for name in names:
            parameters[name].mul_(-1.3)

    return change


def flip(published: Published, name: str) -> None:
    """One bit of a tensor on disk; sizes, header and manifest stay."""
    entry = published.release.tensors[name]
    path = published.folder / entry.file
    content = bytearray(path.read_bytes())
    content[read_header(path)[name].begin] ^= 1
    path.write_bytes(content)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)
