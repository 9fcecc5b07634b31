"""Reads the header of a safetensors file and computes the digests of the file, without torch."""

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from serving.errors import ReleaseError, first_line
from serving.weights.release import FileEntry, TensorEntry, spelled_digest

_PIECE_BYTES = 1 << 20


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


def tensor_digests(path: Path, header: Mapping[str, HeaderEntry]) -> dict[str, str]:
    """Tensor name → digest of the bytes of the tensor in this safetensors file."""
    # The file is read in pieces. If it were mapped, the process would hold all of it at the end.
    piece = memoryview(bytearray(_PIECE_BYTES))
    digests = {}
    with path.open("rb") as file:
        for name, entry in header.items():
            file.seek(entry.begin)
            digest = blake3()
            left = entry.end - entry.begin
            while left and (count := file.readinto(piece[:left])):
                digest.update(piece[:count])
                left -= count
            digests[name] = spelled_digest(digest)
    return digests


def digest_shard(path: Path) -> tuple[FileEntry, dict[str, TensorEntry]]:
    """The size and sha256 of a safetensors file, and a dict of tensor name → manifest entry. Raises
    ReleaseError."""
    header = read_header(path)
    # Both hash functions release the GIL.
    with ThreadPoolExecutor(1) as pool:
        file = pool.submit(digest_file, path)
        digests = tensor_digests(path, header)
    return file.result(), {
        name: TensorEntry(
            file=path.name, dtype=entry.dtype, shape=entry.shape, digest=digests[name]
        )
        for name, entry in header.items()
    }


def digest_file(path: Path) -> FileEntry:
    """Size and sha256 of any file. Raises OSError."""
    with path.open("rb") as file:
        return FileEntry(
            size=path.stat().st_size, sha256=hashlib.file_digest(file, "sha256").hexdigest()
        )
