"""Reads and checks the index of a checkpoint or release. The index is a file that says which shard
(a file with tensors) holds which tensor. This module opens no shard."""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from serving.errors import ReleaseError
from serving.weights.release import faults_in

INDEX_FILE = "model.safetensors.index.json"
BIN_INDEX_FILE = "pytorch_model.bin.index.json"
"""The index of a checkpoint with `.bin` shards."""
INDEX_FILES = (INDEX_FILE, BIN_INDEX_FILE)

_SHARD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.(safetensors|bin)")


class WeightsIndex(BaseModel):
    """The content of `model.safetensors.index.json` or `pytorch_model.bin.index.json`.

    Only the files that `weight_map` names are opened as shards.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    metadata: dict[str, Any] = {}
    """`total_size`: the total size of all tensors in bytes, without the headers of the shards."""
    weight_map: dict[str, str] = Field(min_length=1)
    """Tensor name → file name of its shard. The shard is in the same folder as the index."""

    @field_validator("weight_map")
    @classmethod
    def _check_shards(cls, weight_map: dict[str, str]) -> dict[str, str]:
        for shard in sorted(set(weight_map.values())):
            if not is_shard_name(shard):
                raise ValueError(f"shard {shard!r} is not a plain *.safetensors or *.bin file name")
        return weight_map

    def to_json(self) -> str:
        return json.dumps(self.model_dump(), indent=2) + "\n"


def is_shard_name(name: str) -> bool:
    """Whether `name` is a plain file name with the suffix of a shard. Open a shard only if its name
    passes this check, because a path such as `../x.bin` leads out of the folder."""
    return _SHARD.fullmatch(name) is not None and ".." not in name


def has_bin(files: Iterable[str]) -> bool:
    """Whether a `.bin` shard is among these files. Such a shard is a pickle. No engine reads it, so
    it must be converted."""
    return any(file.endswith(".bin") for file in files)


def read_index(folder: Path, name: str = INDEX_FILE) -> WeightsIndex | None:
    """The index with this file name in a release or checkpoint folder; None if there is no such
    file. Raises ReleaseError if the index is not valid."""
    path = folder / name
    if not path.is_file():
        return None
    try:
        return WeightsIndex.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise ReleaseError(*faults_in(name, error)) from None
