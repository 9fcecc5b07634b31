"""`SlotAllocator`: gives slots and blocks of memory to sequences. It also keeps the KV cache of
finished sequences (prefix cache): a new sequence that begins with the same tokens does not prefill
them again."""

import heapq
from array import array
from dataclasses import dataclass

from serving.engines.torch_engine.runner import Runner

MIN_SHARED_TOKENS = 16
"""With fewer common tokens, prefilling them again is as fast as copying them."""
COPIED_PER_PREFILLED = 32
"""Prefilling one token takes at least as long as copying the keys and values of this many."""
_TOKEN_BYTES = array("I").itemsize
_BYTES_PER_COMPARISON = 4096


@dataclass(eq=False, slots=True)
class Slot:
    """The place of one running or finished sequence in the KV cache."""

    number: int
    tokens: tuple[int, ...] = ()
    """The tokens that the sequence prefills. In a cached slot: all tokens that the slot holds."""
    packed: bytes = b""
    """`tokens` as an array of C. Two of them are compared in a fraction of the time."""
    length: int = 0
    """The number of tokens whose keys and values the slot holds. The generated tokens follow those
    of `tokens`."""
    num_blocks: int = 0
    num_copied: int = 0
    """The number of tokens that were copied from another slot when the sequence began."""


class SlotAllocator:
    """There is one allocator for each release, so two releases share no keys and values. Used by
    the step loop's thread only, except `usage`.

    A slot is empty, running or cached. A cached slot holds a finished sequence until its memory is
    needed. The least recently used slot is freed first.
    """

    def __init__(self, runner: Runner) -> None:
        self._slots = runner.slots
        self._cache_size = runner.cache_size
        self.num_free = runner.cache_size.num_blocks
        """The number of blocks that no slot has."""
        self._empty = list(range(runner.cache_size.num_slots))
        """The numbers of the empty slots, as a heap. The lowest number is used first, so that
        running slots are adjacent if possible."""
        self._running: set[Slot] = set()
        self._cached: dict[Slot, None] = {}

    @property
    def usage(self) -> float:
        """The share of all blocks that running slots have, from 0 to 1. As in vLLM, cached slots do
        not count, because the next sequence that needs their memory gets it."""
        return sum(slot.num_blocks for slot in list(self._running)) / self._cache_size.num_blocks

    def allocate(self, tokens: tuple[int, ...], *, num_spare: int, may_share: bool) -> Slot | None:
        """Returns a slot with memory for `tokens` and one more token. The first `length` tokens of
        the slot are already computed.

        Returns None if there is no memory for that and for `num_spare` more blocks. Also returns
        None if a running sequence is just prefilling tokens that this one can share. The caller
        tries again before the next step.
        """
        size = self._cache_size.blocks(min(len(tokens) + 1, self._cache_size.context))
        num_cached_blocks = sum(slot.num_blocks for slot in self._cached)
        if size + num_spare > self.num_free + num_cached_blocks:
            return None
        source, length = None, 0
        packed = _pack(tokens)
        if may_share:
            source, length, is_worth_waiting = self._find(packed)
            if is_worth_waiting:
                return None
        slot = self._choose(source, length, size + num_spare, num_cached_blocks)
        if slot is None:
            return None
        self._cached.pop(slot, None)
        if source is not None and source in self._cached:
            self._cached[source] = self._cached.pop(source)  # the most recently used
        self._free_blocks(size - slot.num_blocks, without=source)
        self._resize(slot, size)
        slot.tokens, slot.packed, slot.length, slot.num_copied = tokens, packed, length, 0
        self._running.add(slot)
        if source is not None and source is not slot:
            try:
                for layer in self._slots:
                    layer.copy(source.number, slot.number, length)
            except BaseException:
                self.free(slot)
                raise
            slot.num_copied = length
        return slot

    def grow(self, slot: Slot, num_tokens: int) -> bool:
        """Get memory for `num_tokens` tokens in a running slot. Returns False if there is none."""
        size = self._cache_size.blocks(num_tokens)
        if size > slot.num_blocks:
            self._free_blocks(size - slot.num_blocks)
            if size - slot.num_blocks > self.num_free:
                return False
            self._resize(slot, size)
        return True

    def cache(self, slot: Slot, tokens: tuple[int, ...]) -> None:
        """Turn a running slot into a cached one, or free it if it is too short. `tokens` are the
        prompt and the output; the slot holds the first `slot.length` of them."""
        if slot.length < MIN_SHARED_TOKENS:
            self.free(slot)
            return
        self._running.remove(slot)
        slot.tokens = tokens[: slot.length]
        slot.packed = _pack(slot.tokens)
        self._cached[slot] = None
        self._resize(slot, self._cache_size.blocks(slot.length))

    def free(self, slot: Slot) -> None:
        """Free a slot and its memory."""
        self._running.discard(slot)
        self._cached.pop(slot, None)
        self._resize(slot, 0)
        heapq.heappush(self._empty, slot.number)

    def _find(self, packed: bytes) -> tuple[Slot | None, int, bool]:
        """Find the slot that shares the longest prefix with the tokens `packed`.

        Returns this slot, the length of the prefix, and whether to wait because a running slot will
        soon hold a longer prefix. The prefix never includes the last token, because its logits must
        be computed.
        """
        best, length, awaited = None, 0, 0
        for slot in (*self._cached, *self._running):
            # Often many slots share the same prefix, such as a system prompt, and only that.
            following = slice(length * _TOKEN_BYTES, (length + 1) * _TOKEN_BYTES)
            if slot.packed[following] != packed[following]:
                continue
            common = min(_num_common(slot.packed, packed), len(packed) // _TOKEN_BYTES - 1)
            awaited = max(awaited, common)
            if min(common, slot.length) >= max(length + 1, MIN_SHARED_TOKENS):
                best, length = slot, min(common, slot.length)
        return best, length, awaited >= length + MIN_SHARED_TOKENS

    def _choose(
        self, source: Slot | None, length: int, num_blocks: int, num_cached_blocks: int
    ) -> Slot | None:
        """Choose the slot for a sequence that shares `length` tokens with `source`.

        This is `source` itself if it is cached and there is no memory or no slot beside it. It is
        `source` also if prefilling the tokens that it would lose takes no longer than a copy, as
        in a continued conversation, which loses none.
        """
        is_cached = source is not None and source in self._cached
        if source is not None and is_cached:
            others = num_cached_blocks - source.num_blocks
            is_alone = num_blocks > self.num_free + others or not (
                self._empty or len(self._cached) > 1
            )
            lost = source.length - length
            if is_alone or lost * COPIED_PER_PREFILLED <= length:
                return source
        if self._empty:
            return Slot(heapq.heappop(self._empty))
        return next((slot for slot in self._cached if slot is not source), None)

    def _free_blocks(self, number: int, *, without: Slot | None = None) -> None:
        """Free cached slots until `number` blocks are free, or no cached slot is left. The slot
        `without` is not freed."""
        while number > self.num_free:
            slot = next((slot for slot in self._cached if slot is not without), None)
            if slot is None:
                return
            self.free(slot)

    def _resize(self, slot: Slot, num_blocks: int) -> None:
        if num_blocks < slot.num_blocks:
            for layer in self._slots:
                layer.truncate(slot.number, num_blocks * self._cache_size.block_tokens)
        self.num_free += slot.num_blocks - num_blocks
        slot.num_blocks = num_blocks


def _pack(tokens: tuple[int, ...]) -> bytes:
    return array("I", tokens).tobytes()


def _num_common(one: bytes, other: bytes) -> int:
    """The number of tokens in the common prefix."""
    size = min(len(one), len(other))
    start = 0
    step = _BYTES_PER_COMPARISON
    while step >= _TOKEN_BYTES:
        end = min(start + step, size)
        if start < end and one[start:end] == other[start:end]:
            start = end
        else:
            step //= 2
    return start // _TOKEN_BYTES
