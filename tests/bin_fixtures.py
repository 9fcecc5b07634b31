"""Checkpoints with `.bin` shards, as `torch.save` writes them."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from serving.weights.release import BIN_INDEX_FILE
from tests.serving_fixtures import byte_tokenizer
from tests.torch_engine_fixtures import build, llama_config


class Trap:
    """Unpickling it makes a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self._folder),)


def network(*, tied: bool = False, dtype: torch.dtype = torch.float32) -> Any:
    shape = {"vocab_size": 257, "max_position_embeddings": 128, "tie_word_embeddings": tied}
    return build(llama_config(**shape), dtype=dtype)


def bin_folder(folder: Path, network: Any, *, num_shards: int = 2) -> Path:
    """A checkpoint folder of the network. With one shard it has no index. With more, it has the
    index of the specification."""
    folder.mkdir(parents=True)
    network.config.architectures = [type(network).__name__]
    network.config.save_pretrained(folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    state = network.state_dict()
    if num_shards == 1:
        torch.save(state, folder / "pytorch_model.bin")
    else:
        _save_shards(folder, _split(state, num_shards))
    return folder


def _split(state: Mapping[str, torch.Tensor], num_shards: int) -> list[dict[str, torch.Tensor]]:
    """Names that share a tensor get into the same shard, as in `save_pretrained`."""
    shards: list[dict[str, torch.Tensor]] = [{} for _ in range(num_shards)]
    place: dict[int, int] = {}
    for number, (name, tensor) in enumerate(state.items()):
        shard = place.setdefault(tensor.data_ptr(), number * num_shards // len(state))
        shards[shard][name] = tensor
    return shards


def _save_shards(folder: Path, shards: list[dict[str, torch.Tensor]]) -> dict[str, str]:
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file = f"pytorch_model-{number:05d}-of-{len(shards):05d}.bin"
        torch.save(shard, folder / file)
        weight_map |= dict.fromkeys(shard, file)
    total = sum(tensor.nbytes for shard in shards for tensor in shard.values())
    # Sorted by name, as `save_pretrained` of transformers wrote it.
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / BIN_INDEX_FILE).write_text(json.dumps(index))
    return weight_map
