"""`SlotAllocator`: whose each slot is, the blocks of memory that slots share, and what finished sequences
left there: a sequence that begins as one of them did need not read that beginning again."""

import heapq
from dataclasses import dataclass

from serving.engines.torch_engine.runner import Runner

MIN_SHARED_TOKENS = 16
"""Tokens. Fewer are read again as quickly as they are copied."""
_TOKENS_PER_COMPARISON = 256


@dataclass(eq=False, slots=True)
class Slot:
    """KvCacheSize of one sequence, running or finished."""

    number: int
    tokens: tuple[int, ...] = ()
    """What is to be read into it, or was."""
    length: int = 0
    """Tokens whose keys and values it holds: those of `tokens`, then those generated since."""
    num_blocks: int = 0
    num_copied: int = 0
    """Tokens that were copied from another slot when the sequence began."""


class SlotAllocator:
    """Of one release, so that nothing is shared between two. Used by the step loop's thread only.

    A slot is empty, running or kept. A kept one holds a finished sequence until its cache_size is needed,
    the least recently used first.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._cache_size = runner.cache_size
        self._num_free = runner.cache_size.num_blocks
        self._empty = list(range(runner.cache_size.num_slots))
        """Numbers, a heap: slots that run are side by side where they can be."""
        self._running: set[Slot] = set()
        self._cached: dict[Slot, None] = {}

    def allocate(self, tokens: tuple[int, ...], *, num_spare: int, may_share: bool) -> Slot | None:
        """A slot with memory for `tokens` and the next one; its `length` says how many it holds.

        None where there is no cache_size for that and `num_spare` blocks, or where another sequence is
        reading what this one can share: the caller asks again before the next step.
        """
        size = self._cache_size.blocks(min(len(tokens) + 1, self._cache_size.context))
        num_cached_blocks = sum(slot.num_blocks for slot in self._cached)
        if size + num_spare > self._num_free + num_cached_blocks:
            return None
        source, length = None, 0
        if may_share and self._runner.shares_prefixes:
            source, length, is_worth_waiting = self._find(tokens)
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
        slot.tokens, slot.length, slot.num_copied = tokens, length, 0
        if source is not None and source is not slot:
            self._runner.copy(source.number, slot.number, length)
            slot.num_copied = length
        self._running.add(slot)
        return slot

    def grow(self, slot: Slot, num_tokens: int) -> bool:
        """Have memory for that many tokens in a running slot. False where there is none left."""
        size = self._cache_size.blocks(num_tokens)
        if size > slot.num_blocks:
            self._free_blocks(size - slot.num_blocks)
            if size - slot.num_blocks > self._num_free:
                return False
            self._resize(slot, size)
        return True

    def cache(self, slot: Slot, tokens: tuple[int, ...]) -> None:
        """Let a running slot go. What it holds, the first of `tokens`, stays as long as may be."""
        if slot.length < MIN_SHARED_TOKENS or not self._runner.shares_prefixes:
            self.free(slot)
            return
        self._running.remove(slot)
        slot.tokens = tokens[: slot.length]
        self._cached[slot] = None
        self._resize(slot, self._cache_size.blocks(slot.length))

    def free(self, slot: Slot) -> None:
        """Let a slot go, with what it holds."""
        self._running.discard(slot)
        self._cached.pop(slot, None)
        self._resize(slot, 0)
        heapq.heappush(self._empty, slot.number)

    def _find(self, tokens: tuple[int, ...]) -> tuple[Slot | None, int, bool]:
        """The slot that holds most of the beginning of `tokens`; how many (not the last one, whose
        logits are asked for); and whether it is worth waiting for one that will hold more."""
        best, length, awaited = None, 0, 0
        for slot in (*self._cached, *self._running):
            common = min(_num_common(slot.tokens, tokens), len(tokens) - 1)
            awaited = max(awaited, common)
            if min(common, slot.length) >= max(length + 1, MIN_SHARED_TOKENS):
                best, length = slot, min(common, slot.length)
        return best, length, awaited >= length + MIN_SHARED_TOKENS

    def _choose(
        self, source: Slot | None, length: int, num_blocks: int, num_cached_blocks: int
    ) -> Slot | None:
        """Where a sequence goes that begins as `source` does: into `source` itself where that is
        kept and at most half of it would be lost, or where there is no cache_size beside it."""
        is_cached = source is not None and source in self._cached
        if source is not None and is_cached:
            others = num_cached_blocks - source.num_blocks
            is_alone = num_blocks > self._num_free + others or not (
                self._empty or len(self._cached) > 1
            )
            if 2 * length >= source.length or is_alone:
                return source
        if self._empty:
            return Slot(heapq.heappop(self._empty))
        return next((slot for slot in self._cached if slot is not source), None)

    def _free_blocks(self, number: int, *, without: Slot | None = None) -> None:
        """Take the cache_size of kept slots until so many blocks are free, or none is kept."""
        while number > self._num_free:
            slot = next((slot for slot in self._cached if slot is not without), None)
            if slot is None:
                return
            self.free(slot)

    def _resize(self, slot: Slot, num_blocks: int) -> None:
        if num_blocks < slot.num_blocks:
            self._runner.truncate(slot.number, num_blocks * self._cache_size.block_tokens)
        self._num_free += slot.num_blocks - num_blocks
        slot.num_blocks = num_blocks


def _num_common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """How many tokens two sequences have in common before they differ."""
    if one is other:
        return len(one)
    for start in range(0, min(len(one), len(other)), _TOKENS_PER_COMPARISON):
        end = start + _TOKENS_PER_COMPARISON
        if one[start:end] != other[start:end]:
            pairs = zip(one[start:end], other[start:end], strict=False)
            differs = (number for number, (a, b) in enumerate(pairs) if a != b)
            return start + next(differs, min(len(one), len(other), end) - start)
    return min(len(one), len(other))
