"""The memory of keys and values: what it may hold, and what it takes from the system."""

import asyncio
import mmap
from pathlib import Path
from typing import Any

import pytest
import torch

from serving.engine import Step
from serving.engines.torch_engine import slots
from serving.engines.torch_engine.slots import KeyValueSlots, LayerShape, page_table_bytes
from tests.torch_engine_fixtures import (
    ask,
    build,
    engine_with,
    greedy,
    llama_config,
    prompt,
    publish,
)

TABLES = Path("/proc/self/status")
RESIDENT = Path("/proc/self/smaps_rollup")


def make_slots(num_tokens: int = 256, dtype: torch.dtype = torch.float32) -> KeyValueSlots:
    shape = LayerShape(num_heads=4, key_size=64, value_size=64)
    return KeyValueSlots(shape, num_slots=64, num_tokens=num_tokens, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_numbers_that_are_not_finite_become_zero(dtype: torch.dtype) -> None:
    memory = make_slots(dtype=dtype)
    bad = torch.ones(1, 2, 4, 64, dtype=dtype)
    bad[..., :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    memory.write_run(5, 0, bad.clone())
    memory.write_rows(memory.row_indices([6], [0]), bad.clone())
    for found in memory.read(5, 7, 1):
        assert found[..., :3].eq(0).all()
        assert found[..., 3:].eq(1).all()


def test_a_sequence_that_overflows_changes_no_later_one(tmp_path: Path) -> None:
    """Its values of the token `bad` are infinite in float16. The next sequence takes its slot over,
    and attends together with a longer one, so columns that it has not written are masked."""
    bad = 7
    network: Any = build(llama_config(num_hidden_layers=1))
    with torch.no_grad():
        embedding = network.model.embed_tokens.weight
        embedding[:, 0] = 0
        embedding[bad] = 0
        embedding[bad, 0] = 1.0
        network.model.layers[0].self_attn.v_proj.weight[:, 0] = 60000.0
    published = publish(network, tmp_path)
    clean, other = (
        tuple(8 if token_id == bad else token_id for token_id in prompt(110, seed))
        for seed in (3, 4)
    )
    poison = greedy((*clean[:96], *(bad,) * 3), max_tokens=1)

    async def answers(*, after_poison: bool) -> list[float]:
        async with engine_with(published, dtype="float16") as engine:
            if after_poison:
                await ask(engine, published.id, poison)
            both = await asyncio.gather(
                ask(engine, published.id, greedy(clean[:97], max_tokens=5, num_logprobs=0)),
                ask(engine, published.id, greedy(other, max_tokens=5, num_logprobs=0)),
            )
            assert both[0][0].num_cached_tokens == (96 if after_poison else 0)
            return [logprob for steps in both for logprob in logprobs(steps)]

    right = asyncio.run(answers(after_poison=False))
    assert asyncio.run(answers(after_poison=True)) == pytest.approx(right, abs=2e-2)


def logprobs(steps: list[Step]) -> list[float]:
    return [each.logprob for step in steps for each in step.logprobs]


def told_bytes(file: Path, name: str) -> int:
    (line,) = (line for line in file.read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


@pytest.mark.skipif(not TABLES.exists(), reason="the system tells no size of page tables")
@pytest.mark.parametrize("num_tokens", [64, 1 << 14])
def test_page_tables_are_counted(num_tokens: int) -> None:
    layers = [make_slots(num_tokens) for _ in range(2)]
    before = told_bytes(TABLES, "VmPTE:")
    token = torch.ones(1, 2, 4, 64)
    for layer in layers:
        for slot in range(64):
            layer.write_run(slot, 0, token)
    counted = page_table_bytes(2 * 4, 64, num_tokens * 64 * 4)
    assert told_bytes(TABLES, "VmPTE:") - before == pytest.approx(counted, rel=0.1, abs=1 << 16)


class Memory(mmap.mmap):
    """Refuses the advice against huge pages, as a kernel without them does."""

    def madvise(self, advice: int, *span: int) -> None:
        if advice == mmap.MADV_NOHUGEPAGE:
            raise OSError(22, "Invalid argument")
        super().madvise(advice, *span)


@pytest.mark.skipif(not hasattr(mmap, "MADV_NOHUGEPAGE"), reason="only on Linux")
def test_a_kernel_without_huge_pages_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots.mmap, "mmap", Memory)
    memory = make_slots()
    memory.write_run(0, 0, torch.ones(1, 2, 4, 64))
    memory.truncate(0, 0)
    assert memory.read(0, 1, 1)[0].eq(0).all()


@pytest.mark.skipif(not hasattr(mmap, "MADV_FREE"), reason="not on this system")
def test_pages_are_freed_by_the_advice_that_frees_on_the_system(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[int] = []

    class Watched(mmap.mmap):
        def madvise(self, advice: int, *span: int) -> None:
            given.append(advice)

    monkeypatch.setattr(slots.mmap, "mmap", Watched)
    memory = make_slots()
    for platform, expected in (("linux", mmap.MADV_DONTNEED), ("darwin", mmap.MADV_FREE)):
        given.clear()
        monkeypatch.setattr(slots.sys, "platform", platform)
        memory.truncate(0, 0)
        assert set(given) == {expected}


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 256])
def test_a_block_of_tokens_is_whole_pages_of_each_head(head_dim: int, dtype: torch.dtype) -> None:
    count = slots.block_tokens(head_dim, dtype)
    assert count >= 16
    assert count * head_dim * dtype.itemsize % slots.mmap.PAGESIZE == 0
