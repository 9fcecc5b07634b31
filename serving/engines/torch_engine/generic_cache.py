"""The KV cache that networks of `transformers` use. It keeps keys and values in the engine's slots.

In each slot, a sequence begins at the first column, so a batch is padded on the right. Sequences
can join and leave a batch, and nothing must be moved. Import this module only to run a network of
`transformers`, because the import takes seconds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin
from transformers.masking_utils import (
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)

from serving.engines.torch_engine.slots import KeyValueSlots, LayerShape


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """What one forward pass reads and writes: either new tokens of one slot, or one new token in
    each of several slots."""

    slots: Sequence[int]
    """The slot numbers, in ascending order."""
    starts: Sequence[int]
    """The number of tokens that each slot already holds."""
    num_new: int

    @property
    def longest(self) -> int:
        return max(self.starts) + self.num_new


class SlotCache(Cache):  # type: ignore[misc]
    """The cache of all layers. Call `prepare` before each forward pass."""

    def __init__(self, layers: "Sequence[SlotLayer]", device: torch.device) -> None:
        super().__init__(layers=list(layers))
        self._device = device

    def prepare(self, rows: Rows) -> Tensor:
        """Set the slots of the next forward pass. Returns the positions of the new tokens,
        [slots, new tokens]."""
        for layer in self.layers:
            layer.prepare(rows)
        starts = torch.tensor(rows.starts, device=self._device)[:, None]
        return starts + torch.arange(rows.num_new, device=self._device)


class SlotLayer(CacheLayerMixin):  # type: ignore[misc]
    is_sliding = False
    """False, because all tokens are kept. A mask hides those that are outside a window."""

    def __init__(self, slots: KeyValueSlots, shape: LayerShape) -> None:
        super().__init__()
        self._slots = slots
        self._shape = shape

    def prepare(self, rows: Rows) -> None:
        self._rows = rows
        if len(rows.slots) > 1:
            self._row_indices = self._slots.row_indices(rows.slots, rows.starts)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Does nothing, because the slots exist already."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store the new keys and values, each [slots, heads, new tokens, size].

        Returns all keys and values of the slots, each [slots, heads, longest, size]. Columns after
        the end of a shorter sequence hold arbitrary values, which the mask must hide.
        """
        rows, size = self._rows, self._shape.head_dim
        new = torch.stack([_by_token(key_states, size), _by_token(value_states, size)], dim=1)
        if len(rows.slots) > 1:
            self._slots.write_rows(0, self._row_indices, new)
        else:
            self._slots.write_run(0, rows.slots[0], rows.starts[0], new)
        first, end = rows.slots[0], rows.slots[-1] + 1
        keys, values = self._slots.read(0, first, end, rows.longest)
        if end - first > len(rows.slots):
            chosen = torch.tensor([slot - first for slot in rows.slots], device=keys.device)
            keys, values = keys.index_select(0, chosen), values.index_select(0, chosen)
        return keys[..., : self._shape.key_size], values[..., : self._shape.value_size]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._rows.longest, 0

    def get_seq_length(self) -> int:
        return self._rows.longest - self._rows.num_new

    def get_max_length(self) -> int:
        return -1


class KeepsState(Exception):
    """The network keeps something else than keys and values, such as a recurrent state."""


class ShapeRecorder(Cache):  # type: ignore[misc]
    """Records the shapes of the keys and values that each layer would keep."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.shapes: list[LayerShape] = []

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        assert layer_idx == len(self.shapes), "layers come in order, and each once"
        sizes = {"key_size": key_states.shape[-1], "value_size": value_states.shape[-1]}
        self.shapes.append(LayerShape(num_heads=key_states.shape[1], **sizes))
        return key_states, value_states

    def has_previous_state(self, *args: Any, **kwargs: Any) -> bool:
        raise KeepsState

    def update_conv_state(self, *args: Any, **kwargs: Any) -> Tensor:
        raise KeepsState

    def update_recurrent_state(self, *args: Any, **kwargs: Any) -> Tensor:
        raise KeepsState


def batch_masks(
    config: PreTrainedConfig, positions: Tensor, length: int, dtype: torch.dtype
) -> Tensor | dict[str, Tensor] | None:
    """The attention mask for the newest tokens of several sequences with different lengths.

    `positions` is [slots, 1], and `length` is that of the longest sequence. Returns None for a
    single sequence, because then `transformers` makes the mask.

    If no sequence is longer than a window, the result is a mask [slots, length] of existing tokens.
    Otherwise `transformers` would measure each sequence's window from the end of the longest
    sequence. So the masks are made here: one mask for all layers, or a dict with one for each kind
    of layer, as `transformers.masking_utils.create_masks_for_generate` does.
    """
    if len(positions) == 1:
        return None
    columns = torch.arange(length, device=positions.device)
    text = config.get_text_config()
    windows = _windows(text)
    if length <= min((size for size in windows.values() if size is not None), default=length):
        return (columns <= positions).long()
    masks = {
        kind: _as_attention_bias(_mask(kind, size, positions, columns), text, dtype)
        for kind, size in windows.items()
    }
    return masks if getattr(text, "layer_types", None) is not None else next(iter(masks.values()))


def _windows(text: Any) -> Mapping[str, int | None]:
    """For each kind of layer: how many tokens it looks back; None for no limit."""
    kinds = getattr(text, "layer_types", None)
    window = getattr(text, "sliding_window", None)
    chunk = getattr(text, "attention_chunk_size", None)
    if kinds is None:
        kinds = [
            "sliding_attention" if window else "chunked_attention" if chunk else "full_attention"
        ]
    sizes = {"sliding_attention": window, "chunked_attention": chunk}
    return {kind: sizes.get(kind) for kind in dict.fromkeys(kinds)}


def _mask(kind: str, size: int | None, positions: Tensor, columns: Tensor) -> Tensor:
    """bool [slots, 1, 1, columns]: True where the newest token may look."""
    rows = torch.arange(len(positions), device=positions.device)[:, None, None, None]
    if size is None:
        look = causal_mask_function
    elif kind == "chunked_attention":
        look = chunked_causal_mask_function(size, torch.zeros_like(rows[:, 0, 0, 0]))
    else:
        look = sliding_window_causal_mask_function(size)
    found: Tensor = look(rows, 0, positions[:, None, None], columns[None, None, None])
    return found


def _as_attention_bias(mask: Tensor, text: Any, dtype: torch.dtype) -> Tensor:
    if text._attn_implementation != "eager":
        return mask
    zeros = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return zeros.masked_fill_(~mask, torch.finfo(dtype).min)


def _by_token(states: Tensor, size: int) -> Tensor:
    """[tokens, heads, size]: keys or values, padded to `size`, the larger of both sizes."""
    if states.shape[-1] < size:
        states = torch.nn.functional.pad(states, (0, size - states.shape[-1]))
    return states.transpose(1, 2).flatten(0, 1)
