"""Which slot a sequence gets, and what stays in the prefix cache beside it."""

import pytest

from serving.engines.torch_engine.slots import KvCacheSize, Slot, SlotAllocator


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
        self.slots = [self]
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
