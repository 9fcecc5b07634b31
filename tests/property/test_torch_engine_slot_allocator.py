"""Whatever sequences come and go: no block is given twice, none is lost, and what is shared is what
was read."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from serving.engines.torch_engine.slots import (
    MIN_SHARED_TOKENS,
    Batch,
    KvCacheSize,
    Slot,
    SlotAllocator,
)

CONTEXT = 96


class TokenSlots:
    """A runner whose slots hold tokens, and which computes nothing."""

    vocab_size = 2

    def __init__(self, cache_size: KvCacheSize) -> None:
        self.cache_size = cache_size
        self.slots = [self]
        self.held: list[list[int]] = [[] for _ in range(cache_size.num_slots)]

    def forward(self, batch: Batch) -> None:  # type: ignore[override]
        raise AssertionError("an allocator computes no step")

    def truncate(self, slot: int, length: int) -> None:
        del self.held[slot][length:]

    def copy(self, source: int, target: int, length: int) -> None:
        assert len(self.held[source]) >= length
        self.held[target] = self.held[source][:length]


class Sequences(RuleBasedStateMachine):
    @initialize(
        num_slots=st.integers(1, 5),
        num_blocks=st.integers(CONTEXT // 8, 4 * CONTEXT // 8),
    )
    def begin(self, num_slots: int, num_blocks: int) -> None:
        cache_size = KvCacheSize(
            num_slots=num_slots,
            num_blocks=num_blocks,
            block_tokens=8,
            block_bytes=1,
            context=CONTEXT,
        )
        self.runner = TokenSlots(cache_size)
        self.allocator = SlotAllocator(self.runner)  # type: ignore[arg-type]
        self.running: list[Slot] = []
        self.texts: dict[Slot, list[int]] = {}

    @rule(
        shared=st.integers(0, CONTEXT - 1),
        own=st.lists(st.integers(1, 2), min_size=1, max_size=20),
        num_spare=st.integers(0, 2),
        may_share=st.booleans(),
    )
    def allocate(self, shared: int, own: list[int], num_spare: int, may_share: bool) -> None:
        tokens = ((0,) * shared + tuple(own))[:CONTEXT]
        slot = self.allocator.allocate(tokens, num_spare=num_spare, may_share=may_share)
        if slot is None:
            # With nobody else there is always room, and nobody to wait for.
            assert self.running or num_spare
            return
        assert slot not in self.running
        assert slot.length < len(tokens)
        assert slot.length == 0 or (may_share and slot.length >= MIN_SHARED_TOKENS)
        assert self.runner.held[slot.number][: slot.length] == list(tokens[: slot.length])
        self.running.append(slot)
        self.texts[slot] = list(tokens)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), count=st.integers(1, 40))
    def read(self, data: st.DataObject, count: int) -> None:
        slot = data.draw(st.sampled_from(self.running))
        unread = slot.tokens[slot.length : slot.length + count]
        held = self.runner.held[slot.number]
        held[slot.length :] = unread
        slot.length += len(unread)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), token_id=st.integers(0, 2))
    def generate(self, data: st.DataObject, token_id: int) -> None:
        slot = data.draw(st.sampled_from(self.running))
        if not len(slot.tokens) <= slot.length < CONTEXT:
            return
        if not self.allocator.grow(slot, slot.length + 1):
            assert sum(one.num_blocks for one in self.running) == self.runner.cache_size.num_blocks
            return
        self.runner.held[slot.number][slot.length :] = [token_id]
        self.texts[slot].append(token_id)
        slot.length += 1

    @precondition(lambda self: self.running)
    @rule(data=st.data(), is_cached=st.booleans())
    def leave(self, data: st.DataObject, is_cached: bool) -> None:
        slot = data.draw(st.sampled_from(self.running))
        self.running.remove(slot)
        text = tuple(self.texts.pop(slot))
        if is_cached:
            self.allocator.cache(slot, text)
        else:
            self.allocator.free(slot)

    @invariant()
    def blocks_add_up(self) -> None:
        if not hasattr(self, "allocator"):
            return
        cached = list(self.allocator._cached)
        slots = [*self.running, *cached]
        numbers = [slot.number for slot in slots] + self.allocator._empty
        assert sorted(numbers) == list(range(self.runner.cache_size.num_slots))
        used = sum(slot.num_blocks for slot in slots)
        running = sum(slot.num_blocks for slot in self.running)
        assert self.allocator.usage == running / self.runner.cache_size.num_blocks <= 1
        assert used + self.allocator.num_free == self.runner.cache_size.num_blocks
        assert self.allocator.num_free >= 0
        for slot in slots:
            held = self.runner.held[slot.number]
            assert slot.length <= len(held) <= slot.num_blocks * 8
        for slot in cached:
            assert tuple(self.runner.held[slot.number][: slot.length]) == slot.tokens


TestSequences = Sequences.TestCase
