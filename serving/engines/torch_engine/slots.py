"""A network with its KV cache (`Runner`), and what it gets and keeps: `Batch`, the tokens of one
step; `KeyValueSlots`, where their keys and values are stored (`plan_cache` says how many fit); and
`SlotAllocator`, which gives slots to sequences.

A slot has an address range for a whole context, so attention can read a sequence without copying
it. The operating system does the paging, as a GPU's driver does for vAttention
(arXiv:2405.04437): a page takes memory from the first write until it is freed.
"""

import contextlib
import heapq
import logging
import math
import mmap
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from serving.engines.settings import TorchEngineSettings
from serving.errors import ReleaseError

_log = logging.getLogger(__name__)

_SLOTS_PER_SEQUENCE = 2
"""One slot for each running sequence, and one for a finished sequence in the prefix cache."""
_MIN_BLOCK_TOKENS = 16
MIN_SHARED_TOKENS = 16
"""With fewer common tokens, prefilling them again is as fast as copying them."""
COPIED_PER_PREFILLED = 32
"""Prefilling one token takes at least as long as copying the keys and values of this many."""
_TOKEN_BYTES = array("I").itemsize
_BYTES_PER_COMPARISON = 4096


def block_tokens(head_dim: int, dtype: torch.dtype) -> int:
    """The number of tokens in a block: the keys of one head in a block fill whole pages. Memory is
    taken and freed in blocks."""
    row_bytes = head_dim * dtype.itemsize
    whole = math.lcm(row_bytes, mmap.PAGESIZE) // row_bytes
    return whole * -(-_MIN_BLOCK_TOKENS // whole)


@dataclass(frozen=True, kw_only=True, slots=True)
class KvCacheSize:
    """The size of the KV cache of one release.

    A slot has an address range for a whole context. Memory is counted in blocks, which all slots
    share.
    """

    num_slots: int
    num_blocks: int
    """At least the number of blocks for one sequence of `context` tokens."""
    block_tokens: int
    block_bytes: int
    context: int
    """The largest number of tokens in a sequence, prompt included."""

    @property
    def slot_tokens(self) -> int:
        """The length of a slot's address range: a context, in whole blocks."""
        return self.blocks(self.context) * self.block_tokens

    def blocks(self, num_tokens: int) -> int:
        """The number of blocks for `num_tokens` tokens of one sequence."""
        return -(-num_tokens // self.block_tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerShape:
    """The keys and values that a layer keeps for each token."""

    num_heads: int
    key_size: int
    value_size: int

    @property
    def head_dim(self) -> int:
        """The width of a slot, for keys and for values."""
        return max(self.key_size, self.value_size)

    def token_bytes(self, dtype: torch.dtype) -> int:
        return 2 * self.num_heads * self.head_dim * dtype.itemsize


def page_table_bytes(num_heads: int, num_slots: int, slot_head_bytes: int) -> int:
    """The memory of the page tables when every slot has been used. `num_heads` counts the KV heads
    of all layers; the keys of one head have an address range of `slot_head_bytes` in each slot, and
    so have its values.

    A page table is one page, and its entries of 8 bytes map `PAGESIZE / 8` pages. Most of these
    ranges are longer than that, so each of them needs a table of its own for its first tokens. The
    tables stay until the release is unloaded.
    """
    num_ranges = 2 * num_heads * num_slots
    num_mapped = num_ranges * slot_head_bytes // (mmap.PAGESIZE * mmap.PAGESIZE // 8) + 1
    return min(num_ranges, num_mapped) * mmap.PAGESIZE


def plan_cache(
    settings: TorchEngineSettings, allowed: int, layers: Sequence[LayerShape], dtype: torch.dtype
) -> KvCacheSize:
    """The size of the KV cache of a network that allows a context of `allowed` tokens. Raises
    ReleaseError if not even one sequence fits into the cache."""
    tokens_of_block = math.lcm(*(block_tokens(each.head_dim, dtype) for each in layers))
    block_bytes = tokens_of_block * sum(each.token_bytes(dtype) for each in layers)
    num_blocks = settings.kv_cache_bytes // block_bytes
    context = min(allowed, settings.max_context or allowed)
    fitting = num_blocks * tokens_of_block
    if fitting < context and settings.max_context is None and fitting:
        # If a release allows a long context, serve it with a shorter one instead of refusing it.
        _log.warning(
            "kv_cache_bytes (%d) is too small for a sequence of %d tokens, which the release "
            "allows: max_context is lowered to %d",
            *(settings.kv_cache_bytes, context, fitting),
        )
        context = fitting
    slot_blocks = -(-context // tokens_of_block)
    if num_blocks < slot_blocks:
        raise ReleaseError(
            f"one sequence of {context} tokens needs {slot_blocks * block_bytes} bytes of keys and "
            f"values, but kv_cache_bytes is {settings.kv_cache_bytes}; raise kv_cache_bytes or "
            "lower max_context, under [serving.torch]"
        )
    num_slots = _SLOTS_PER_SEQUENCE * settings.max_batch
    return KvCacheSize(
        num_slots=num_slots,
        num_blocks=min(num_blocks, num_slots * slot_blocks),
        block_tokens=tokens_of_block,
        block_bytes=block_bytes,
        context=context,
    )


class KeyValueSlots:
    """The keys and values of one layer: a tensor [2, slots, KV heads, tokens, head dim], keys
    first. Its pages take memory from the first write on.

    The tensor never holds NaN or infinity. Attention reads old content: tokens that earlier
    sequences left in a slot, and the slots between those of a batch. A mask gives such columns the
    probability 0, but 0 times NaN is NaN.
    """

    def __init__(
        self, shape: LayerShape, *, num_slots: int, num_tokens: int, dtype: torch.dtype
    ) -> None:
        """`num_tokens` is the length of a slot, a multiple of `block_tokens`. Raises OSError if the
        system does not provide the address range."""
        self.shape, self.dtype = shape, dtype
        sizes = (2, num_slots, shape.num_heads, num_tokens, shape.head_dim)
        numel = math.prod(sizes)
        self._memory = mmap.mmap(
            -1,
            numel * dtype.itemsize,
            flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0),
        )
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            # Otherwise the first token of each head would take a page of 2 MB. A kernel without
            # huge pages refuses the advice, and does not need it.
            with contextlib.suppress(OSError):
                self._memory.madvise(mmap.MADV_NOHUGEPAGE)
        self._tensor = torch.frombuffer(self._memory, dtype=dtype, count=numel).view(sizes)
        # A view of the same memory, with one row for each token of each head.
        self._by_row = self._tensor.view(-1, shape.head_dim)

    def row_indices(self, slots: Sequence[int], positions: Sequence[int]) -> Tensor:
        """The indices for `write_rows`, for one token in each slot: int64 [slots * 2 * KV heads].
        `positions` are the tokens' positions. They are the same for layers of the same shape."""
        _, num_slots, num_heads, num_tokens, _ = self._tensor.shape
        token = torch.tensor(positions)[:, None, None]
        slot = torch.tensor(slots)[:, None, None]
        head = torch.arange(num_heads)
        kind = torch.arange(2)[:, None]
        return (((kind * num_slots + slot) * num_heads + head) * num_tokens + token).flatten()

    def write_rows(self, row_indices: Tensor, keys_values: Tensor) -> None:
        """Write tokens of several slots. `keys_values` is [rows, 2, KV heads, head dim]. It is
        changed: numbers that are not finite become 0."""
        keys_values.nan_to_num_(0.0, 0.0, 0.0)
        self._by_row.index_copy_(0, row_indices, keys_values.reshape(len(row_indices), -1))

    def write_run(self, slot: int, start: int, keys_values: Tensor) -> None:
        """Write the tokens of one slot from position `start` on. `keys_values` is
        [tokens, 2, KV heads, head dim]. It is changed: numbers that are not finite become 0."""
        keys_values.nan_to_num_(0.0, 0.0, 0.0)
        run = self._tensor[:, slot, :, start : start + len(keys_values)]
        run.copy_(keys_values.permute(1, 2, 0, 3))

    def read(self, first: int, end: int, length: int) -> tuple[Tensor, Tensor]:
        """The keys and the values of the slots from `first` to before `end`. Both are views
        [slots, KV heads, length, head dim]."""
        found = self._tensor[:, first:end, :, :length]
        return found[0], found[1]

    def copy(self, source: int, target: int, length: int) -> None:
        self._tensor[:, target, :, :length] = self._tensor[:, source, :, :length]

    def truncate(self, slot: int, length: int) -> None:
        """Free the pages after the first `length` tokens of a slot. `length` must be a multiple of
        `block_tokens`."""
        # macOS frees nothing for MADV_DONTNEED. After MADV_FREE, old content may still be read.
        advice = mmap.MADV_FREE if sys.platform == "darwin" else mmap.MADV_DONTNEED
        kinds, num_slots, num_heads, num_tokens, head_dim = self._tensor.shape
        row_bytes = head_dim * self._tensor.itemsize
        for kind in range(kinds):
            for head in range(num_heads):
                row = ((kind * num_slots + slot) * num_heads + head) * num_tokens + length
                if size := (num_tokens - length) * row_bytes:
                    self._memory.madvise(advice, row * row_bytes, size)


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """Consecutive tokens of one sequence that one step prefills."""

    slot: int
    start: int
    """The number of tokens that the slot already holds. If it holds more than `start` tokens, those
    after the first `start` are overwritten."""
    token_ids: tuple[int, ...]
    num_wanted: int
    """For how many of these tokens logits are computed. They are the last ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """What one step computes. No slot appears twice, neither in `slots` nor in `chunks`."""

    slots: Sequence[int]
    """The slots of the sequences that decode, in ascending order. Numbers may be missing."""
    token_ids: Sequence[int]
    """The newest token of each slot in `slots`."""
    lengths: Sequence[int]
    """The number of tokens that each slot in `slots` already holds."""
    chunks: Sequence[Chunk]


class Runner(Protocol):
    """The network of a release, with its KV cache. Used by one thread only."""

    cache_size: KvCacheSize
    layer_slots: Sequence[KeyValueSlots]
    """The slots of each layer."""
    vocab_size: int

    def forward(self, batch: Batch) -> Tensor:
        """Compute one step. Returns float32 logits [rows, vocabulary]: one row for each decoding
        slot, then the requested rows of each chunk in order."""


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
    the step loop's thread only, except `usage` and `num_free`, which others may read.

    A slot is empty, running or cached. A cached slot holds a finished sequence until its memory is
    needed. The least recently used slot is freed first.
    """

    def __init__(self, runner: Runner) -> None:
        self._layers = runner.layer_slots
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
                for layer in self._layers:
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
            for layer in self._layers:
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
