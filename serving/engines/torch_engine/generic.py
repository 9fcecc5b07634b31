"""Runs any causal network of `transformers` through its own forward pass."""

import inspect
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from serving.engine import StageError
from serving.engines.torch_engine.runner import Batch
from serving.engines.torch_engine.slots import KeyValueSlots, KvCacheSize, LayerShape
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

    Raises StageError if the network keeps something else than keys and values.
    """
    from serving.engines.torch_engine.generic_cache import KeepsState, ShapeRecorder

    # In 16 bits, because the operators of experts (MoE) compute shapes for no other dtypes.
    empty: Any = network.build_network(folder, torch.bfloat16, is_empty=True)
    # Scaling changes no shape, and it reads the values of positions, which do not exist here.
    _keep_frequencies(empty)
    recorder = ShapeRecorder()
    name = f"{folder / network.CONFIG_FILE}: {type(empty).__name__}"
    try:
        if "past_key_values" not in inspect.signature(empty.forward).parameters:
            raise KeepsState
        token_ids = torch.zeros(1, 2, dtype=torch.long, device="meta")
        empty(input_ids=token_ids, past_key_values=recorder, use_cache=True)
    except KeepsState:
        raise StageError(
            f"{name} keeps a state for each sequence, not the keys and values of each token, and "
            'the torch engine has no room for states; vLLM may serve it: set engine = "vllm" under '
            "[serving]"
        ) from None
    # Without values, a network may fail in many ways.
    except Exception as error:
        raise StageError(f"{name}: cannot be run on shapes alone: {error}") from error
    return recorder.shapes


def allowed_context(config: Any) -> int:
    """The largest number of tokens in a sequence that the network allows.

    LongRoPE has two sets of frequencies: one for texts of `original_max_position_embeddings`
    tokens, one for longer texts. Training and probes use short texts, and so the first set. The
    engine uses this set alone.
    """
    return min(network.context_length(config), *_original_contexts(config), 1 << 62)


class TransformersRunner:
    """Computes all decoding sequences in one forward pass, or each in its own if the network is not
    in `BATCHED` or `BATCHED_BY_KIND`. Each prefill chunk has its own forward pass too."""

    def __init__(
        self,
        network: Any,
        layers: Sequence[KeyValueSlots],
        shapes: Sequence[LayerShape],
        *,
        cache_size: KvCacheSize,
        device: torch.device,
    ) -> None:
        """`layers` and `shapes` have one entry for each layer of `network`."""
        from serving.engines.torch_engine.generic_cache import SlotCache, SlotLayer

        self.cache_size = cache_size
        self.stored: list[Tensor] = []
        """The stored tensors whose memory the network uses."""
        self._config: Any = network.config
        self.vocab_size: int = self._config.get_text_config().vocab_size
        network.requires_grad_(False)
        # Weights are on the device already. This moves the buffers that no checkpoint holds.
        self._network = network.to(device)
        _keep_frequencies(self._network)
        self._is_batched = _is_batched(self._config)
        self._device = device
        self._dtype = next(network.parameters()).dtype
        self._takes = inspect.signature(network.forward).parameters.keys()
        self._layers = layers
        self._cache = SlotCache(list(map(SlotLayer, layers, shapes)), device)

    def warm_up(self) -> None:
        """Does nothing, because no kernel depends on the batch size."""

    def truncate(self, slot: int, length: int) -> None:
        for layer in self._layers:
            layer.truncate(slot, length)

    def copy(self, source: int, target: int, length: int) -> None:
        for layer in self._layers:
            layer.copy(source, target, length)

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
        from serving.engines.torch_engine import generic_cache

        rows = generic_cache.Rows(slots=slots, starts=starts, num_new=len(token_ids[0]))
        positions = self._cache.prepare(rows)
        asked = {"position_ids": positions, "logits_to_keep": keep}
        answer = self._network(
            input_ids=torch.tensor(token_ids, device=self._device),
            attention_mask=generic_cache.batch_masks(
                self._config, positions, rows.longest, self._dtype
            ),
            past_key_values=self._cache,
            use_cache=True,
            **{name: value for name, value in asked.items() if name in self._takes},
        )
        logits: Tensor = answer.logits[:, -keep:].flatten(0, 1).float()
        return logits


def _is_batched(config: Any) -> bool:
    """Whether several sequences are computed together."""
    if config.model_type in BATCHED_BY_KIND:
        return True
    # A configuration may name kinds of layers that its network ignores.
    has_kinds = getattr(config.get_text_config(), "layer_types", None) is not None
    return config.model_type in BATCHED and not has_kinds


def _keep_frequencies(network: Any) -> None:
    """Let every forward pass use the frequencies that the network has now. Only some kinds of RoPE
    have frequencies that depend on the length of the text: LongRoPE (arXiv:2402.13753) and dynamic
    NTK scaling.

    `transformers` chooses these frequencies again in each forward pass, from the largest position
    in it. In the engine, a forward pass computes several sequences or a part of one, and the slots
    hold keys of earlier passes. So an answer would depend on other sequences and on how its prompt
    was divided.
    """
    for module, layer_type in list(_changing(network)):
        if layer_type is None:
            module.rope_type = "default"
        else:
            module.rope_type[layer_type] = "default"


def _changing(network: Any) -> Iterator[tuple[Any, str | None]]:
    """The modules that choose frequencies in each forward pass. A module that does this for several
    kinds of layers comes once with each kind."""
    for module in network.modules():
        kinds = getattr(module, "rope_type", None)
        for layer_type, kind in kinds.items() if isinstance(kinds, dict) else ((None, kinds),):
            if kind is not None and (kind == "longrope" or "dynamic" in kind):
                yield module, layer_type


def _original_contexts(config: Any) -> Iterator[int]:
    """`original_max_position_embeddings` of each kind of layers with LongRoPE."""
    parameters = getattr(config.get_text_config(), "rope_parameters", None) or {}
    for each in (parameters, *parameters.values()):
        if isinstance(each, dict) and each.get("rope_type") == "longrope":
            yield each["original_max_position_embeddings"]
