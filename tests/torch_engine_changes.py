"""Releases that differ from another one, and a condition to wait for."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.torch_engine_fixtures import (
    Published,
    build,
    publish,
)

Change = Callable[[dict[str, torch.Tensor]], None]


def changed(network: Any, home: Path, change: Change, **options: Any) -> Published:
    other = build(network.config)
    other.load_state_dict(network.state_dict())
    with torch.no_grad():
        change(dict(other.named_parameters()))
    return publish(other, home, **options)


def nudge(*names: str) -> Change:
    def change(parameters: dict[str, torch.Tensor]) -> None:
        for name in names:
            parameters[name].mul_(-1.3)

    return change


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)
