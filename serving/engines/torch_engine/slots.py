"""`KeyValueSlots`: stores keys and values, in one slot for each sequence and in every layer.

A slot has an address range for a whole context, so attention can read a sequence without copying
it. The operating system does the paging, as a GPU's driver does for vAttention
(arXiv:2405.04437): a page takes memory from the first write until it is freed.
"""

import contextlib
import math
import mmap
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_MIN_BLOCK_TOKENS = 16


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
