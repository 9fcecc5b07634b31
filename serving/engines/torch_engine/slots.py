"""`KeyValueSlots`: room for the keys and values of sequences, one slot each, in every layer."""

import mmap

import torch
from torch import Tensor


class KeyValueSlots:
    """Per layer one tensor [2, slots, kv heads, context, head dim]: keys, then values."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_slots: int,
        num_kv_heads: int,
        context: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (2, num_slots, num_kv_heads, context, head_dim)
        self._layers = [_zeros(shape, dtype, device) for _ in range(num_layers)]
        # The same memory, indexed by (slot, position).
        self._by_token = [layer.permute(1, 3, 0, 2, 4) for layer in self._layers]

    def write(self, layer: int, slots: Tensor, positions: Tensor, keys_values: Tensor) -> None:
        """`keys_values` is [rows, 2, kv heads, head dim], one row per (slot, position)."""
        self._by_token[layer].index_put_((slots, positions), keys_values)

    def read(self, layer: int, first: int, end: int, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values of slots `first` to `end`, each a view
        [slots, kv heads, length, head dim]."""
        found = self._layers[layer][:, first:end, :, :length]
        return found[0], found[1]

    def move(self, source: int, target: int, length: int) -> None:
        for layer in self._layers:
            layer[:, target, :, :length] = layer[:, source, :, :length]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros: what lies beyond a sequence's end is masked out, and must not be NaN for that.

    On the CPU they are pages that the system hands out when first touched, and takes back whole.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    numel = torch.Size(shape).numel()
    pages = mmap.mmap(-1, numel * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype, count=numel).view(shape)
