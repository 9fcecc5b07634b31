"""Runs any causal network of `transformers` through its own forward pass. Its KV cache keeps keys
and values in the engine's slots.

In each slot, a sequence begins at the first column, so a batch is padded on the right. Sequences
can join and leave a batch, and nothing must be moved. Import this module only to run a network of
`transformers`, because the import takes seconds.
"""

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from serving.engines.torch_engine.slots import Batch, KeyValueSlots, KvCacheSize, LayerShape
from serving.errors import ReleaseError
from serving.weights import network

BATCHED = frozenset(
    (
        "bloom", "cohere", "deepseek_v2", "deepseek_v3", "falcon", "gemma", "glm", "glm4", "gpt2",
        "gpt_neox", "gptj", "granite", "granitemoe", "llama", "ministral3", "mistral", "mixtral",
        "mpt", "olmo", "olmo2", "olmoe", "opt", "phi", "phi3", "qwen3_moe", "stablelm",
        "starcoder2",
    )
)  # fmt: skip
"""The types of networks whose sequences are computed together, with one mask for all layers.

In a forward pass with sequences of different lengths, a network must take the place of each token
from its position, not from the end of the longest sequence. Only the code of the network shows
whether it does, so a type belongs here only if a test compares it with `transformers`. All other
networks compute one sequence at a time. Bloom and MPT have no position ids, but add a bias to each
key by its column (ALiBi, arXiv:2108.12409), which in our slots is its position.
"""
BATCHED_BY_KIND = frozenset(
    (
        "cohere2", "exaone4", "gemma2", "gemma3", "gemma3_text", "gpt_oss", "ministral", "olmo3",
        "qwen2", "qwen2_moe", "qwen3", "smollm3",
    )
)  # fmt: skip
"""The same, with a mask for each kind of layers."""


def layer_shapes(folder: Path) -> list[LayerShape]:
    """The shapes of the keys and values that each layer keeps for a token. The network is run on
    the meta device, without weights.

    Raises ReleaseError if the network keeps something else than keys and values.
    """
    # In 16 bits, because the operators of experts (MoE) compute shapes for no other dtypes.
    empty: Any = network.build_network(folder, torch.bfloat16, is_empty=True)
    # Scaling changes no shape, and it reads the values of positions, which do not exist here.
    _keep_frequencies(empty)
    name = f"{folder / network.CONFIG_FILE}: {type(empty).__name__}"
    try:
        cache = DynamicCache(config=empty.config)
        kinds = {type(layer) for layer in cache.layers}
        takes_cache = "past_key_values" in inspect.signature(empty.forward).parameters
        if takes_cache and kinds <= {DynamicLayer, DynamicSlidingWindowLayer}:
            token_ids = torch.zeros(1, 2, dtype=torch.long, device="meta")
            empty(input_ids=token_ids, past_key_values=cache, use_cache=True)
            return [
                LayerShape(
                    num_heads=layer.keys.shape[1],
                    key_size=layer.keys.shape[-1],
                    value_size=layer.values.shape[-1],
                )
                for layer in cache.layers
            ]
    # Without values, a network may fail in many ways.
    except Exception as error:
        raise ReleaseError(f"{name}: cannot be run on shapes alone: {error}") from error
    raise ReleaseError(
        f"{name} keeps a state for each sequence, not the keys and values of each token, and "
        'the torch engine has no room for states; vLLM may serve it: set engine = "vllm" under '
        "[serving]"
    )


def allowed_context(config: Any) -> int:
    """The largest number of tokens in a sequence that the network allows.

    LongRoPE has two sets of frequencies: one for texts of `original_max_position_embeddings`
    tokens, one for longer texts. Training and probes use short texts, and so the first set. The
    engine uses this set alone.
    """
    context = network.context_length(config)
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        context = min(context, rope["original_max_position_embeddings"])
    return context


class SlotLayer(CacheLayerMixin):  # type: ignore[misc]
    """The cache of one layer. Call `prepare` before each forward pass."""

    is_sliding = False
    """False, because all tokens are kept. A mask hides those that are outside a window."""

    def __init__(self, slots: KeyValueSlots) -> None:
        super().__init__()
        self._slots = slots

    def prepare(self, slots: Sequence[int], starts: Sequence[int], num_new: int) -> None:
        """The forward pass computes either new tokens of one slot, or one new token in each of
        several slots. `slots` are in ascending order, and hold `starts` tokens each."""
        self._numbers, self._starts = slots, starts
        self._longest = max(starts) + num_new
        if len(slots) > 1:
            self._row_indices = self._slots.row_indices(slots, starts)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Does nothing, because the slots exist already."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store the new keys and values, each [slots, heads, new tokens, size].

        Returns all keys and values of the slots, each [slots, heads, longest, size]. Columns after
        the end of a shorter sequence hold arbitrary values, which the mask must hide.
        """
        numbers, shape = self._numbers, self._slots.shape
        new = torch.stack([_by_token(each, shape) for each in (key_states, value_states)], dim=1)
        if len(numbers) > 1:
            self._slots.write_rows(self._row_indices, new)
        else:
            self._slots.write_run(numbers[0], self._starts[0], new)
        first, end = numbers[0], numbers[-1] + 1
        keys, values = self._slots.read(first, end, self._longest)
        if end - first > len(numbers):
            chosen = torch.tensor([number - first for number in numbers])
            keys, values = keys.index_select(0, chosen), values.index_select(0, chosen)
        return keys[..., : shape.key_size], values[..., : shape.value_size]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._longest, 0

    def get_seq_length(self) -> int:
        return max(self._starts)

    def get_max_length(self) -> int:
        return -1


class TransformersRunner:
    """Computes all decoding sequences in one forward pass, or each in its own if the network is not
    in `BATCHED` or `BATCHED_BY_KIND`. Each prefill chunk has its own forward pass too."""

    def __init__(
        self, network: Any, slots: Sequence[KeyValueSlots], cache_size: KvCacheSize
    ) -> None:
        self.cache_size = cache_size
        self.stored: list[Tensor] = []
        """The stored tensors whose memory the network uses."""
        self._config: Any = network.config
        self.vocab_size: int = self._config.get_text_config().vocab_size
        self._network = network.requires_grad_(False)
        _keep_frequencies(network)
        self._is_batched = _is_batched(self._config)
        self._takes = inspect.signature(network.forward).parameters.keys()
        self.layer_slots = slots
        self._cache = Cache(layers=[SlotLayer(each) for each in slots])

    def forward(self, batch: Batch) -> Tensor:
        rows = []
        size = max(1, len(batch.slots)) if self._is_batched else 1
        for first in range(0, len(batch.slots), size):
            end = first + size
            token_ids = [[token_id] for token_id in batch.token_ids[first:end]]
            rows.append(self._read(batch.slots[first:end], batch.lengths[first:end], token_ids, 1))
        for chunk in batch.chunks:
            keep = max(1, chunk.num_wanted)
            logits = self._read([chunk.slot], [chunk.start], [list(chunk.token_ids)], keep)
            rows.append(logits[: chunk.num_wanted])
        return torch.cat(rows)

    def _read(
        self, slots: Sequence[int], starts: Sequence[int], token_ids: list[list[int]], keep: int
    ) -> Tensor:
        """float32 logits [slots times keep, vocabulary] of the last `keep` tokens of each slot."""
        num_new = len(token_ids[0])
        for layer in self._cache.layers:
            layer.prepare(slots, starts, num_new)
        positions = torch.tensor(starts)[:, None] + torch.arange(num_new)
        asked = {"position_ids": positions, "logits_to_keep": keep}
        answer = self._network(
            input_ids=torch.tensor(token_ids),
            # For a single sequence, `transformers` makes the mask.
            attention_mask=self._batch_masks(positions) if len(slots) > 1 else None,
            past_key_values=self._cache,
            use_cache=True,
            **{name: value for name, value in asked.items() if name in self._takes},
        )
        logits: Tensor = answer.logits[:, -keep:].flatten(0, 1).float()
        return logits

    def _batch_masks(self, positions: Tensor) -> Tensor | dict[str, Tensor]:
        """The attention mask for the newest tokens of sequences with different lengths.
        `positions` is [slots, 1].

        If no sequence is longer than the window, the result is a mask [slots, length] of existing
        tokens. Otherwise `transformers` would measure each sequence's window from the end of the
        longest sequence. So the masks are made here: one mask for all layers, or a dict with one
        for each kind of layer, as `transformers.masking_utils.create_masks_for_generate` does.
        """
        text = self._config.get_text_config()
        window = getattr(text, "sliding_window", None)
        columns = torch.arange(int(positions.max()) + 1)
        exists = columns <= positions
        if window is None or len(columns) <= window:
            return exists.long()
        is_near = exists & (columns > positions - window)
        masks = {
            "full_attention": _additive(exists, self._network.dtype),
            "sliding_attention": _additive(is_near, self._network.dtype),
        }
        has_kinds = getattr(text, "layer_types", None) is not None
        return masks if has_kinds else masks["sliding_attention"]


def _additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask [slots, 1, 1, columns] to be added to scores, as some networks do."""
    mask = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min)
    return mask[:, None, None]


def _is_batched(config: Any) -> bool:
    """Whether several sequences are computed together."""
    if config.model_type in BATCHED_BY_KIND:
        return True
    # A configuration may name kinds of layers that its network ignores.
    has_kinds = getattr(config.get_text_config(), "layer_types", None) is not None
    return config.model_type in BATCHED and not has_kinds


def _keep_frequencies(network: Any) -> None:
    """Let every forward pass use the frequencies that the network has now. Some kinds of RoPE have
    frequencies that depend on the length of the text: LongRoPE (arXiv:2402.13753) and dynamic NTK
    scaling.

    `transformers` chooses these frequencies again in each forward pass, from the largest position
    in it. In the engine, a forward pass computes several sequences or a part of one, and the slots
    hold keys of earlier passes. So an answer would depend on other sequences and on how its prompt
    was divided.
    """
    for module in network.modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, dict):  # a kind of RoPE for each kind of layers
            module.rope_type = dict.fromkeys(kind, "default")
        elif kind in ("dynamic", "longrope"):
            module.rope_type = "default"


def _by_token(states: Tensor, shape: LayerShape) -> Tensor:
    """[tokens, heads, head dim]: keys or values, padded to the larger of both sizes."""
    if states.shape[-1] < shape.head_dim:
        states = torch.nn.functional.pad(states, (0, shape.head_dim - states.shape[-1]))
    return states.transpose(1, 2).flatten(0, 1)
