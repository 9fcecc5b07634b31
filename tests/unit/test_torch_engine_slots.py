"""The memory of keys and values: what it may hold, and what it takes from the system. Which slot a
sequence gets, and what stays in the prefix cache beside it."""

from pathlib import Path

import pytest
import torch

from serving.engines.torch_engine.slots import (
    KeyValueSlots,
    KvCacheSize,
    LayerShape,
    Slot,
    SlotAllocator,
)

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


class Runner:
    """Computes nothing, and remembers what is copied."""

    vocab_size = 2

    def __init__(self, num_slots: int = 4) -> None:
        self.cache_size = KvCacheSize(
            num_slots=num_slots,
            num_blocks=100 * num_slots,
            block_tokens=16,
            block_bytes=1,
            context=1600,
        )
        self.layer_slots = [self]
        self.copied: list[int] = []

    def truncate(self, slot: int, length: int) -> None: ...

    def copy(self, source: int, target: int, length: int) -> None:
        self.copied.append(length)


def make_allocator(**settings: int) -> tuple[SlotAllocator, Runner]:
    runner = Runner(**settings)
    return SlotAllocator(runner), runner  # type: ignore[arg-type]


def compute(allocator: SlotAllocator, tokens: tuple[int, ...]) -> tuple[Slot, int]:
    """A slot that holds all tokens, and how many of them it shared."""
    slot = allocator.allocate(tokens, num_spare=0, may_share=True)
    assert slot is not None
    shared, slot.length = slot.length, len(tokens)
    return slot, shared


def answer(allocator: SlotAllocator, *tokens: int) -> int:
    """How many tokens a finished sequence shared."""
    slot, shared = compute(allocator, tokens)
    allocator.cache(slot, tokens)
    return shared


SYSTEM = (1,) * 400
FIRST, SECOND = (2,) * 100, (3,) * 100


def test_conversations_with_one_system_prompt_do_not_take_each_others_slot() -> None:
    allocator, runner = make_allocator()
    assert answer(allocator, *SYSTEM, *FIRST) == 0
    assert answer(allocator, *SYSTEM, *SECOND) == 400
    assert answer(allocator, *SYSTEM, *FIRST, 5, 6) == 500
    assert answer(allocator, *SYSTEM, *SECOND, 5, 6) == 500
    assert runner.copied == [400]


def test_a_slot_that_loses_less_than_a_copy_costs_is_taken_over() -> None:
    allocator, runner = make_allocator()
    answer(allocator, *SYSTEM, *(2,) * 12)
    # As prefilling 12 tokens takes at least as long as copying 384.
    assert answer(allocator, *SYSTEM, 3, 3) == 400
    assert runner.copied == []


def test_the_only_slot_is_taken_over_whatever_it_loses() -> None:
    allocator, runner = make_allocator(num_slots=1)
    answer(allocator, *SYSTEM, *FIRST)
    assert answer(allocator, *SYSTEM, *SECOND) == 400
    assert runner.copied == []


@pytest.mark.parametrize("common", [17, 1023, 1024, 1025, 1500])
def test_the_common_prefix_is_found_to_the_token(common: int) -> None:
    allocator, _ = make_allocator()
    tokens = tuple(range(1550))
    answer(allocator, *tokens)
    assert answer(allocator, *tokens[:common], 7, 7) == common
    # The last token is always computed.
    assert answer(allocator, *tokens[:common]) == common - 1


def test_the_longest_of_several_prefixes_is_found() -> None:
    allocator, _ = make_allocator()
    tokens = tuple(range(500))
    for common in (100, 300, 200):
        answer(allocator, *tokens[:common], *(common + 1000,) * 100)
    assert answer(allocator, *tokens) == 300
