"""The memory of keys and values: what it may hold, and what it takes from the system."""

from pathlib import Path

import pytest
import torch

from serving.engines.torch_engine.slots import KeyValueSlots, LayerShape

RESIDENT = Path("/proc/self/smaps_rollup")


def make_slots(num_tokens: int = 256, dtype: torch.dtype = torch.float32) -> KeyValueSlots:
    shape = LayerShape(num_heads=4, key_size=64, value_size=64)
    return KeyValueSlots(shape, num_slots=64, num_tokens=num_tokens, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_numbers_that_are_not_finite_become_zero(dtype: torch.dtype) -> None:
    """Attention also reads columns that a mask hides, and 0 times NaN is NaN."""
    memory = make_slots(dtype=dtype)
    bad = torch.ones(1, 2, 4, 64, dtype=dtype)
    bad[..., :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    memory.write_run(5, 0, bad.clone())
    memory.write_rows(memory.row_indices([6], [0]), bad.clone())
    for found in memory.read(5, 7, 1):
        assert found[..., :3].eq(0).all()
        assert found[..., 3:].eq(1).all()


def told_bytes(file: Path, name: str) -> int:
    (line,) = (line for line in file.read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


@pytest.mark.skipif(not RESIDENT.exists(), reason="the system tells no RSS")
def test_pages_take_memory_when_written_and_give_it_back_when_cut() -> None:
    layers = [make_slots(1 << 14) for _ in range(2)]
    before = told_bytes(RESIDENT, "Rss:")
    count = 8192  # 4 KiB of keys and values a token: 32 MiB
    keys_values = torch.ones(count, 2, 4, 64)
    written = told_bytes(RESIDENT, "Rss:")
    for layer in layers:
        layer.write_run(3, 0, keys_values)
    full = told_bytes(RESIDENT, "Rss:")
    for layer in layers:
        layer.truncate(3, 1024)
    keys, values = layers[0].read(3, 4, 1024)
    assert keys.eq(1).all()
    assert values.eq(1).all()
    cut = told_bytes(RESIDENT, "Rss:")
    keys, _ = layers[1].read(3, 4, count)
    assert keys[:, :, 1024:].eq(0).all()
    for layer in layers:
        layer.truncate(3, 0)
    assert written - before < 20 << 20, "addresses alone take no memory"
    assert full - written > 28 << 20
    assert full - cut > 24 << 20
    assert told_bytes(RESIDENT, "Rss:") - written < 4 << 20
