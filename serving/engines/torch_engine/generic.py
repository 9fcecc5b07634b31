"""Any causal network of `transformers`, through its own forward pass, one sequence at a time."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from serving.engine import StageError
from serving.engines.torch_engine.runner import Batch, Room
from serving.engines.torch_engine.units import Built, Part, Unit

BLOCK_TOKENS = 16


def build_network(folder: Path) -> nn.Module:
    """The network that `config.json` describes, its weights not yet set.

    Raises StageError where `transformers` does not know it. No code of the release runs.
    """
    # Imported here: a Llama needs none of it, and it takes seconds.
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        with no_init_weights():
            network: nn.Module = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
            network.tie_weights()  # type: ignore[operator]
    except (ValueError, KeyError, OSError, ImportError) as error:
        raise StageError(
            f"{folder / 'config.json'}: transformers cannot build this architecture: {error}"
        ) from error
    return network.eval()


def units(network: nn.Module, stored: Mapping[str, object]) -> dict[str, Unit]:
    """A plain unit for every parameter and persistent buffer, named as in its state dict.

    Of names that are tied to each other one is enough; `stored` says which are there.
    """
    found: dict[str, Unit] = {}
    for names in _tied_names(network):
        name = next((name for name in names if name in stored), names[0])
        shape = tuple(network.state_dict()[name].shape)
        unit = Unit(
            kind="plain", parts=(Part(name=name, shape=shape),), build=lambda parts: parts[0]
        )
        for alias in names:
            found[alias] = unit
    return found


def ties(units: Mapping[str, Unit]) -> dict[str, str]:
    """Names of `units` that are another tensor's, which is enough."""
    return {name: unit.parts[0].name for name, unit in units.items() if name != unit.parts[0].name}


def _tied_names(network: nn.Module) -> list[list[str]]:
    by_tensor: dict[int, list[str]] = {}
    for name, tensor in network.state_dict(keep_vars=True).items():
        by_tensor.setdefault(id(tensor), []).append(name)
    return list(by_tensor.values())


def context(network: nn.Module) -> int:
    """Tokens that a sequence may have; generous where the configuration names no limit."""
    config: Any = network.config
    return int(getattr(config.get_text_config(), "max_position_embeddings", 8192))


def token_bytes(network: nn.Module, dtype: torch.dtype) -> int:
    """Of keys and values per token, an estimate from above: as if no heads were shared."""
    config: Any = network.config
    text = config.get_text_config()
    return int(2 * text.num_hidden_layers * text.hidden_size * dtype.itemsize)


class TransformersRunner:
    shares_prefixes = False

    def __init__(
        self,
        network: nn.Module,
        built: Mapping[str, Built],
        *,
        room: Room,
        device: torch.device,
    ) -> None:
        config: Any = network.config
        self.room = room
        self.vocab_size: int = config.get_text_config().vocab_size
        network.requires_grad_(False)
        # The module wraps each tensor in a parameter of its own; the pool knows the tensors.
        self._weights = dict(built)
        network.load_state_dict(self._weights, assign=True)
        # Weights are where they should be; what is left are buffers that no checkpoint holds.
        self._network = network.to(device)
        self._device = device
        self._caches: list[Any] = [None] * room.num_slots

    def warm_up(self) -> None:
        """Sequences are computed one by one: no batch has a size."""

    def cut(self, slot: int, length: int) -> None:
        if not length:
            self._caches[slot] = None

    def copy(self, source: int, target: int, length: int) -> None:
        raise NotImplementedError("nothing is shared")

    def forward(self, batch: Batch) -> Tensor:
        decoding = zip(batch.slots, batch.token_ids, strict=True)
        rows = [self._read(slot, [token_id]) for slot, token_id in decoding]
        for chunk in batch.chunks:
            if chunk.start == 0:
                self._caches[chunk.slot] = None
            logits = self._read(chunk.slot, list(chunk.token_ids))
            first = {"none": len(logits), "last": len(logits) - 1, "all": 0}[chunk.wants]
            rows.append(logits[first:])
        return torch.cat(rows)

    def _read(self, slot: int, token_ids: list[int]) -> Tensor:
        answer = self._network(
            input_ids=torch.tensor([token_ids], device=self._device),
            past_key_values=self._caches[slot],
            use_cache=True,
        )
        self._caches[slot] = answer.past_key_values
        logits: Tensor = answer.logits[0].float()
        return logits
