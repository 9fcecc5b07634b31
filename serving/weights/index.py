"""Reads and checks the index of a checkpoint or release. The index is a file that says which shard
(a file with tensors) holds which tensor. This module opens no shard."""

import json
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from serving.errors import ReleaseError
from serving.weights.headers import DTYPE_BYTES
from serving.weights.release import FileEntry, TensorEntry, faults_in

INDEX_FILE = "model.safetensors.index.json"
BIN_INDEX_FILE = "pytorch_model.bin.index.json"
"""The index of a checkpoint with `.bin` shards."""
INDEX_FILES = (INDEX_FILE, BIN_INDEX_FILE)

MAX_INDEX_BYTES = 64 * 2**20
_SHARD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.(safetensors|bin)")
_NUMBERED = re.compile(r".*-(\d+)-of-(\d+)\.(?:safetensors|bin)")


class IndexMetadata(BaseModel):
    model_config = ConfigDict(frozen=True, extra="allow")

    total_size: int = Field(ge=0, strict=True)
    """The total size of all tensors in bytes, without the headers of the shards."""


class WeightsIndex(BaseModel):
    """The content of `model.safetensors.index.json` or `pytorch_model.bin.index.json`.

    Only the files that `weight_map` names are opened as shards.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    metadata: IndexMetadata
    weight_map: dict[str, str] = Field(min_length=1)
    """Tensor name → file name of its shard. The shard is in the same folder as the index."""

    @field_validator("weight_map")
    @classmethod
    def _check_shards(cls, weight_map: dict[str, str]) -> dict[str, str]:
        shards = sorted(set(weight_map.values()))
        for shard in shards:
            if not is_shard_name(shard):
                raise ValueError(f"shard {shard!r} is not a plain *.safetensors or *.bin file name")
        if len({Path(shard).suffix for shard in shards}) > 1:
            raise ValueError(
                "shards are partly .safetensors and partly .bin; all must have the same format"
            )
        for shard in shards:
            numbers = _NUMBERED.fullmatch(shard)
            if numbers and not 1 <= int(numbers[1]) <= int(numbers[2]):
                raise ValueError(
                    f"shard {shard!r} has a number that is not between 1 and the total in its name"
                )
        return weight_map

    @property
    def shards(self) -> list[str]:
        return sorted(set(self.weight_map.values()))

    def to_json(self) -> str:
        return json.dumps(self.model_dump(), indent=2) + "\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredWeights:
    """A description of weights that a folder holds as shards."""

    files: dict[str, FileEntry]
    """Only the shards, no other file."""
    tensors: dict[str, TensorEntry]
    tied: dict[str, str]
    """Alias → stored name. An alias is a tensor name that uses the bytes of another tensor and has
    no bytes of its own."""

    @property
    def index(self) -> WeightsIndex:
        sizes = [
            math.prod(entry.shape) * DTYPE_BYTES[entry.dtype] for entry in self.tensors.values()
        ]
        return WeightsIndex(
            metadata=IndexMetadata(total_size=sum(sizes)),
            weight_map={name: entry.file for name, entry in self.tensors.items()},
        )


def is_shard_name(name: str) -> bool:
    """Whether `name` is a plain file name with the suffix of a shard. Open a shard only if its name
    passes this check, because a path such as `../x.bin` leads out of the folder."""
    return _SHARD.fullmatch(name) is not None and ".." not in name


def has_bin(files: Iterable[str]) -> bool:
    """Whether a `.bin` shard is among these files. Such a shard is a pickle. No engine reads it, so
    it must be converted."""
    return any(file.endswith(".bin") for file in files)


def shard_name(number: int, total: int) -> str:
    """`model-00001-of-00003.safetensors` for number 1 of 3."""
    return f"model-{number:05d}-of-{total:05d}.safetensors"


def wrong_names(shard: str, names: Collection[str], weight_map: Mapping[str, str]) -> list[str]:
    """The tensors in which a shard and the index disagree, one sentence each. `names` are the
    tensors that the shard holds."""
    expected = {name for name, file in weight_map.items() if file == shard}
    return [
        *(
            f"{shard}: tensor {name}: in the index, not in the shard"
            for name in sorted(expected.difference(names))
        ),
        *(
            f"{shard}: tensor {name}: in the shard, not in the index"
            for name in sorted(set(names) - expected)
        ),
    ]


def parse_index(text: str | bytes, name: str) -> WeightsIndex:
    """The index in the JSON `text`. Raises ReleaseError if the index is not valid or names a tensor
    twice. `name` is the name of the index file, for the error message."""
    try:
        content = json.loads(text, object_pairs_hook=_no_duplicates)
        return WeightsIndex.model_validate(content)
    except ValidationError as error:
        raise ReleaseError(*faults_in(name, error)) from None
    except (ValueError, RecursionError) as error:
        raise ReleaseError(f"{name}: {error}") from None


def read_index(folder: Path, name: str = INDEX_FILE) -> WeightsIndex | None:
    """The index with this file name in a release or checkpoint folder; None if there is no such
    file. Raises ReleaseError if the index is not valid."""
    path = folder / name
    if not path.is_file():
        return None
    if path.stat().st_size > MAX_INDEX_BYTES:
        raise ReleaseError(f"{name}: larger than the limit of {MAX_INDEX_BYTES} bytes")
    return parse_index(path.read_bytes(), name)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = sorted(name for name, count in counts.items() if count > 1)
        raise ValueError(f"named twice: {', '.join(twice)}")
    return found
