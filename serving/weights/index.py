"""What the files of a checkpoint or release say, read without torch: the index (it says which shard
holds which tensor), the headers of the shards, and the digests."""

import hashlib
import json
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from serving.errors import ReleaseError, first_line
from serving.weights.release import FileEntry, TensorEntry, faults_in, spelled_digest

INDEX_FILE = "model.safetensors.index.json"
BIN_INDEX_FILE = "pytorch_model.bin.index.json"
"""The index of a checkpoint with `.bin` shards."""
INDEX_FILES = (INDEX_FILE, BIN_INDEX_FILE)

_SHARD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.(safetensors|bin)")
_PIECE_BYTES = 1 << 20


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


@dataclass(frozen=True, kw_only=True, slots=True)
class HeaderEntry:
    dtype: str
    shape: tuple[int, ...]
    begin: int
    """Offset of the tensor's first byte in the file."""
    end: int
    """Offset of the first byte after the tensor."""


def read_header(path: Path) -> dict[str, HeaderEntry]:
    """Tensor name → header entry. Raises ReleaseError if the file is not a complete safetensors
    file."""
    # Imported here, because a machine that only has the hub and the receiver does not have it.
    from safetensors import SafetensorError, safe_open

    try:
        # This checks the header, and that the tensors fill the rest of the file without gaps.
        with safe_open(path, "np"), path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
    except SafetensorError as error:
        raise ReleaseError(
            f"{path.name}: truncated or not a safetensors file: {first_line(error)}"
        ) from None
    header.pop("__metadata__", None)
    entries = {}
    for name, each in header.items():
        begin, end = (8 + size + offset for offset in each["data_offsets"])
        entries[name] = HeaderEntry(
            dtype=each["dtype"], shape=tuple(each["shape"]), begin=begin, end=end
        )
    return entries


def digest_shard(path: Path) -> tuple[FileEntry, dict[str, TensorEntry]]:
    """The size and sha256 of a safetensors file, and a dict of tensor name → manifest entry. Raises
    ReleaseError."""
    header = read_header(path)
    entries = {}
    # Both hash functions release the GIL.
    with ThreadPoolExecutor(1) as pool, path.open("rb") as shard:
        whole = pool.submit(digest_file, path)
        # The file is read in pieces. If it were mapped, the process would hold all of it at the
        # end.
        piece = memoryview(bytearray(_PIECE_BYTES))
        for name, entry in header.items():
            shard.seek(entry.begin)
            digest = blake3()
            left = entry.end - entry.begin
            while left and (count := shard.readinto(piece[:left])):
                digest.update(piece[:count])
                left -= count
            entries[name] = TensorEntry(
                file=path.name, dtype=entry.dtype, shape=entry.shape, digest=spelled_digest(digest)
            )
    return whole.result(), entries


def digest_file(path: Path) -> FileEntry:
    """Size and sha256 of any file. Raises OSError."""
    with path.open("rb") as file:
        return FileEntry(
            size=path.stat().st_size, sha256=hashlib.file_digest(file, "sha256").hexdigest()
        )
