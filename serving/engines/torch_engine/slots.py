"""`KeyValueSlots`: the keys and values of sequences, one slot each, in every layer.

A slot has addresses for a whole context, so that attention reads each sequence where it stands. On
the CPU the operating system does the paging, as a GPU's driver does for vAttention
(arXiv:2405.04437): a page takes memory once something is written there, until it is given back.
"""

import math
import mmap
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

_LEAST_BLOCK_TOKENS = 16


def block_tokens(head_dim: int, dtype: torch.dtype) -> int:
    """How many tokens of one head fill whole pages: memory is taken and given back by as many."""
    row_bytes = head_dim * dtype.itemsize
    whole = math.lcm(row_bytes, mmap.PAGESIZE) // row_bytes
    return whole * -(-_LEAST_BLOCK_TOKENS // whole)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerShape:
    """What a layer keeps of each token."""

    num_heads: int
    key_size: int
    value_size: int

    @property
    def head_dim(self) -> int:
        """Numbers that a slot has for a key, and for a value."""
        return max(self.key_size, self.value_size)

    def token_bytes(self, dtype: torch.dtype) -> int:
        return 2 * self.num_heads * self.head_dim * dtype.itemsize


class KeyValueSlots:
    """Per layer one tensor [2, slots, kv heads, tokens, head dim]: keys, then values."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_slots: int,
        num_kv_heads: int,
        num_tokens: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`num_tokens` is that of a slot, in whole blocks. Raises OSError where the system lends no
        so many addresses."""
        shape = (2, num_slots, num_kv_heads, num_tokens, head_dim)
        self._pages = [_Pages(shape, dtype) for _ in range(num_layers if _is_cpu(device) else 0)]
        # Zeros: what lies beyond a sequence's end is masked out, and must not be NaN for that.
        self._layers = [pages.tensor for pages in self._pages] or [
            torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)
        ]
        # The same memory, a row for each token of each head.
        self._by_row = [layer.view(-1, head_dim) for layer in self._layers]

    def row_indices(self, slots: Seq[int], positions: Seq[int]) -> Tensor:
        """What `write_rows` takes for tokens that are at these positions of these slots."""
        _, num_slots, num_heads, num_tokens, _ = self._layers[0].shape
        device = self._layers[0].device
        token = torch.tensor(positions, device=device)[:, None, None]
        slot = torch.tensor(slots, device=device)[:, None, None]
        head = torch.arange(num_heads, device=device)
        kind = torch.arange(2, device=device)[:, None]
        return (((kind * num_slots + slot) * num_heads + head) * num_tokens + token).flatten()

    def write_rows(self, layer: int, row_indices: Tensor, keys_values: Tensor) -> None:
        """`keys_values` is [rows, 2, kv heads, head dim], a token each, wherever they are."""
        self._by_row[layer].index_copy_(0, row_indices, keys_values.reshape(len(row_indices), -1))

    def write_run(self, layer: int, slot: int, start: int, keys_values: Tensor) -> None:
        """`keys_values` is [tokens, 2, kv heads, head dim], tokens of one slot from `start` on."""
        run = self._layers[layer][:, slot, :, start : start + len(keys_values)]
        run.copy_(keys_values.permute(1, 2, 0, 3))

    def read(self, layer: int, first: int, end: int, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values of slots `first` to `end`, each a view
        [slots, kv heads, length, head dim]."""
        found = self._layers[layer][:, first:end, :, :length]
        return found[0], found[1]

    def copy(self, source: int, target: int, length: int) -> None:
        for layer in self._layers:
            layer[:, target, :, :length] = layer[:, source, :, :length]

    def truncate(self, slot: int, length: int) -> None:
        """Give back the pages of a slot after its first `length` tokens, which fill whole pages."""
        for pages in self._pages:
            pages.free(slot, length)


class _Pages:
    """A tensor whose pages the system hands out when they are first written."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        numel = math.prod(shape)
        self._memory = mmap.mmap(
            -1,
            numel * dtype.itemsize,
            flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0),
        )
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            # A page of 2 MB would be taken for each head's first token.
            self._memory.madvise(mmap.MADV_NOHUGEPAGE)
        self.tensor = torch.frombuffer(self._memory, dtype=dtype, count=numel).view(shape)

    def free(self, slot: int, length: int) -> None:
        if not hasattr(mmap, "MADV_DONTNEED"):  # not on Windows: the pages stay for the next one
            return
        kinds, num_slots, num_heads, num_tokens, head_dim = self.tensor.shape
        row_bytes = head_dim * self.tensor.itemsize
        for kind in range(kinds):
            for head in range(num_heads):
                row = ((kind * num_slots + slot) * num_heads + head) * num_tokens + length
                if size := (num_tokens - length) * row_bytes:
                    self._memory.madvise(mmap.MADV_DONTNEED, row * row_bytes, size)


def _is_cpu(device: torch.device) -> bool:
    return device.type == "cpu"
