"""Writes tensors to safetensors shards (files that each hold a part of the weights), and reads
tensors from shards, with torch. `.bin` shards are read only when they are converted.

This module does not use the safetensors library to write shards, because the library cannot hash
what it writes. If the library (version 0.8) writes the shards and they are hashed afterwards,
publishing takes 1.25 times as long as with this module. If a thread hashes the tensors while the
library writes them, it takes 1.07 times as long. `headers.py` describes the format of these shards.
"""

import json
import os
import pickle
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open

from serving.errors import ReleaseError, first_line
from serving.weights.headers import ShardDigests
from serving.weights.index import StoredWeights, shard_name, wrong_names
from serving.weights.release import FileEntry, Release, TensorEntry

MAX_SHARD_BYTES = 2 * 10**9
"""The default limit of `write_shards` for the size of a shard."""

DTYPES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int16: "I16", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int32: "I32", torch.float32: "F32",
    torch.int64: "I64", torch.float64: "F64", torch.complex64: "C64",
}  # fmt: skip
"""torch dtype → its name in safetensors."""

_ZIP = b"PK\x03\x04"
"""The first bytes of a `.bin` shard. In torch before 1.6, a shard began with a pickle."""
_SHARDS_AT_ONCE = 3
"""How many shards are written at the same time."""
_FINITE_CHECK_ELEMENTS = 1 << 22
"""How many elements of a tensor `is_finite` checks in one operation."""


def find_tied(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Alias → stored name. If two names stand for the same tensor in memory, only the first name is
    stored. The second name is an alias of the first."""
    seen: dict[tuple[object, ...], str] = {}
    tied = {}
    for name, tensor in tensors.items():
        if tensor.numel() == 0:
            continue
        place = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if place in seen:
            tied[name] = seen[place]
        else:
            seen[place] = name
    return tied


def write_shards(
    tensors: Mapping[str, torch.Tensor], folder: Path, *, max_shard_bytes: int = MAX_SHARD_BYTES
) -> StoredWeights:
    """Write a state dict as shards into `folder`, and fsync each shard.

    The tensors are spread over the shards in the order of the state dict. A tensor larger than
    `max_shard_bytes` gets a shard of its own. If several names share a tensor (`find_tied`), the
    tensor is stored only once. Raises ReleaseError for a tensor that cannot be stored, and OSError
    if the disk fails.
    """
    if not tensors:
        raise ReleaseError("there is no tensor to write")
    if max_shard_bytes < 1:
        raise ReleaseError(f"max_shard_bytes must be at least 1, not {max_shard_bytes}")
    for name, tensor in tensors.items():
        if tensor.is_meta or tensor.layout != torch.strided or tensor.dtype not in DTYPES:
            raise ReleaseError(
                f"tensor {name}: {tensor.dtype}, {tensor.layout}, on {tensor.device} "
                "cannot be stored"
            )
    tied = find_tied(tensors)
    stored = {name: tensor for name, tensor in tensors.items() if name not in tied}
    groups = list(_split(stored, max_shard_bytes))
    files: dict[str, FileEntry] = {}
    entries: dict[str, TensorEntry] = {}

    def write_shard(number: int) -> tuple[FileEntry, dict[str, str]]:
        shard = {name: stored[name].detach() for name in groups[number - 1]}
        with (folder / shard_name(number, len(groups))).open("wb") as out:
            return _write_shard(shard, out)

    # Write several shards at the same time, so that one shard can be hashed while another one is
    # written to disk. But if tensors must be copied, write one shard after another, so that memory
    # holds only the copies of one shard's tensors.
    is_copied = any(
        each.device.type != "cpu" or not each.is_contiguous() for each in stored.values()
    )
    with ThreadPoolExecutor(max_workers=1 if is_copied else _SHARDS_AT_ONCE) as pool:
        written = list(pool.map(write_shard, range(1, len(groups) + 1)))
    for number, (names, (entry, digests)) in enumerate(zip(groups, written, strict=True), start=1):
        file = shard_name(number, len(groups))
        files[file] = entry
        for name in names:
            entries[name] = TensorEntry(
                file=file,
                dtype=DTYPES[stored[name].dtype],
                shape=tuple(stored[name].shape),
                digest=digests[name],
            )
    return StoredWeights(files=files, tensors=entries, tied=tied)


def read_tensors(folder: Path, weight_map: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """The tensors of `weight_map` (tensor name → safetensors shard), memory-mapped, on the CPU.

    The mappings are private: a write to a tensor never changes the file. Raises ReleaseError, which
    names the file or the tensor, if a tensor is missing or a shard cannot be read.
    """
    by_shard: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        by_shard.setdefault(file, []).append(name)
    found: dict[str, torch.Tensor] = {}
    for file, names in by_shard.items():
        with _open_shard(folder / file) as shard:
            held = set(shard.keys())
            for name in names:
                if name not in held:
                    raise ReleaseError(f"{file}: tensor {name}: missing from the shard")
                found[name] = shard.get_tensor(name)
    return {name: found[name] for name in weight_map}


def read_bin_shards(folder: Path, weight_map: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """All tensors of the `.bin` shards that `weight_map` names, memory-mapped, on the CPU.

    The tensors have the order of the shards, not that of `weight_map`. The order matters if the
    head and the embedding are one tensor with two names, because `write_shards` keeps only the
    first name (`find_tied`). In a shard, the embedding comes first, as in the network. In
    `weight_map`, the head may come first, because many indexes are sorted by name. Some engines
    would then find no embedding.

    Raises ReleaseError as `read_bin` does, and if the shards do not hold exactly the tensors of
    `weight_map`.
    """
    tensors: dict[str, torch.Tensor] = {}
    reasons: list[str] = []
    for shard in sorted(set(weight_map.values())):
        found = read_bin(folder / shard)
        reasons += wrong_names(shard, found, weight_map)
        tensors |= found
    if reasons:
        raise ReleaseError(*reasons)
    return tensors


def read_bin(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of one `.bin` shard, memory-mapped, on the CPU. (A shard that torch before 1.6
    wrote cannot be mapped, so it is read into memory.) A write to a tensor never changes the file,
    and code in the pickle does not run. Raises ReleaseError if the file cannot be read, or if it
    holds anything but tensors."""
    try:
        with path.open("rb") as file:
            start = file.read(len(_ZIP))
        if not start.startswith((_ZIP, pickle.PROTO)):
            raise ValueError(f"it begins with {start!r}, so torch.save has not written it")
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=start == _ZIP)
    except pickle.UnpicklingError as error:
        raise ReleaseError(
            f"{path.name}: refused ({first_line(error)}); the file holds Python objects that are "
            "not tensors, and loading such objects could run code; save the weights as safetensors"
        ) from None
    # If the file is damaged, or is not a checkpoint, torch may raise any exception: the pickle says
    # which functions are called with which arguments.
    except Exception as error:
        raise ReleaseError(f"{path.name}: cannot be read: {first_line(error)}") from None
    if not isinstance(content, dict) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) and tensor.dtype in DTYPES
        for name, tensor in content.items()
    ):
        raise ReleaseError(
            f"{path.name}: not a dict of tensor names and tensors, or it has a dtype that cannot "
            "be stored; save the weights as safetensors"
        )
    return content


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether `tensor` holds neither NaN nor infinity."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    flat = tensor.reshape(-1)
    # Check the tensor in pieces, because `isfinite` makes a mask with one byte per element. If a
    # float32 tensor were checked in one piece, its mask would need a quarter of the tensor's size.
    pieces = torch.split(flat, _FINITE_CHECK_ELEMENTS)
    # Cast 8-bit floats first, because torch has no isfinite for some of them.
    return all(
        bool((piece.float() if piece.itemsize == 1 else piece).isfinite().all()) for piece in pieces
    )


def not_finite(release: Release, folder: Path) -> list[str]:
    """The reasons why the release must be refused: one for each tensor that holds NaN or infinity.
    Raises ReleaseError if a tensor cannot be read."""
    weight_map = {name: entry.file for name, entry in release.tensors.items()}
    return [
        f"{weight_map[name]}: tensor {name}: holds NaN or infinity"
        for name, tensor in read_tensors(folder, weight_map).items()
        if not is_finite(tensor)
    ]


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor. A shard stores exactly these bytes, and the tensor's digest is a
    digest of them. The tensor is copied only if it is not contiguous or not on the CPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def _split(tensors: Mapping[str, torch.Tensor], max_bytes: int) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name, tensor in tensors.items():
        if names and size + tensor.nbytes > max_bytes:
            yield names
            names, size = [], 0
        names.append(name)
        size += tensor.nbytes
    yield names


def _write_shard(
    tensors: dict[str, torch.Tensor], out: BinaryIO
) -> tuple[FileEntry, dict[str, str]]:
    # Begin with the tensors whose elements have the most bytes. Then the offset of each tensor is a
    # multiple of its element size, as readers expect.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name in names:
        tensor = tensors[name]
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, position + tensor.nbytes],
        }
        position += tensor.nbytes
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    start = len(encoded).to_bytes(8, "little") + encoded
    with ShardDigests() as digests:
        digests.add(start)
        out.write(start)
        for name in names:
            content = tensor_bytes(tensors[name])
            digests.add_tensor(name, content)
            out.write(content)
        out.flush()
        os.fsync(out.fileno())
        return digests.finish()


def _open_shard(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError:
        raise ReleaseError(f"{path.name}: missing") from None
    except (SafetensorError, OSError) as error:
        raise ReleaseError(f"{path.name}: cannot be read: {first_line(error)}") from None
