"""Writes tensors to safetensors shards (files that each hold a part of the weights), and reads
tensors from shards, with torch: in memory that is free, on a thread that leaves the cores to
others. `.bin` shards are read only when they are converted."""

import os
import re
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from serving.errors import ReleaseError, first_line
from serving.weights.atomic_file import fsync
from serving.weights.release import FileEntry, Release, TensorEntry, digest_shard

_FINITE_CHECK_ELEMENTS = 1 << 22
"""How many elements of a tensor `is_finite` checks in one operation."""

_CGROUP_V2 = Path("/sys/fs/cgroup")
# Beside a busy thread, the staging thread gets about a quarter of a core. With a higher nice
# value, it would starve beside other programs. A starved thread may hold a lock that the thread
# that computes needs.
_STAGING_NICENESS = 5


def find_tied(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Alias → stored name. If two names stand for the same tensor in memory, only the first name is
    stored. The second name is an alias of the first."""
    seen: dict[tuple[object, ...], str] = {}
    tied = {}
    for name, tensor in tensors.items():
        if tensor.numel() == 0:
            continue
        place = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if (first := seen.setdefault(place, name)) != name:
            tied[name] = first
    return tied


def write_shards(
    tensors: Mapping[str, torch.Tensor], folder: Path, *, max_shard_bytes: int
) -> tuple[dict[str, FileEntry], dict[str, TensorEntry], dict[str, str]]:
    """Write a state dict as shards into `folder`. Returns what a manifest says of them: its fields
    `files`, `tensors` and `tied`.

    A tensor larger than `max_shard_bytes` gets a shard of its own. If several names share a tensor
    (`find_tied`), the tensor is stored only once. Raises ReleaseError for a tensor that cannot be
    stored, and OSError if the disk fails.
    """
    from huggingface_hub import split_state_dict_into_shards_factory

    tied = find_tied(tensors)
    stored = {name: tensor for name, tensor in tensors.items() if name not in tied}
    split = split_state_dict_into_shards_factory(
        stored,
        get_storage_size=lambda tensor: tensor.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_bytes,
    )
    files: dict[str, FileEntry] = {}
    entries: dict[str, TensorEntry] = {}
    # A shard goes to the disk, and its digests are computed, while the next one is written.
    with ThreadPoolExecutor(2) as pool:
        done = []
        for file, names in split.filename_to_tensors.items():
            _write_shard(folder / file, {name: stored[name] for name in names})
            path = folder / file
            done.append((file, pool.submit(fsync, path), pool.submit(digest_shard, path)))
        for file, synced, digested in done:
            synced.result()  # the system tells an error of the disk only once
            files[file], found = digested.result()
            entries |= found
    return files, entries, tied


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
        try:
            with safe_open(folder / file, "pt") as shard:
                for name in names:
                    found[name] = shard.get_tensor(name)
        except FileNotFoundError:
            raise ReleaseError(f"{file}: missing") from None
        # The error for a missing tensor names the tensor.
        except (SafetensorError, OSError) as error:
            raise ReleaseError(f"{file}: cannot be read: {first_line(error)}") from None
    return {name: found[name] for name in weight_map}


def read_bin(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of one `.bin` shard, on the CPU, memory-mapped if possible. A write to a tensor
    never changes the file, and code in the pickle does not run. Raises ReleaseError if the file
    cannot be read, or if it holds anything but tensors."""
    try:
        # Shards from before torch 1.6 are no zip files, and cannot be mapped.
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zipfile(path))
        if not all(isinstance(tensor, torch.Tensor) for tensor in content.values()):
            raise TypeError("not a dict of tensor names and tensors")
    # If the file is damaged, or is not a checkpoint, torch may raise any exception.
    except Exception as error:
        raise ReleaseError(
            f"{path.name}: cannot be read: {first_line(error)}; save the weights as safetensors"
        ) from None
    return dict(content)


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether `tensor` holds neither NaN nor infinity."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    # 8-bit floats are cast, because torch cannot compare them. In pieces, this takes little memory.
    for piece in torch.split(tensor.reshape(-1), _FINITE_CHECK_ELEMENTS):
        low, high = torch.aminmax(piece.float() if piece.itemsize == 1 else piece)
        # If the piece has NaN, both are NaN.
        if not (low.isfinite() and high.isfinite()):
            return False
    return True


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


def free_bytes() -> int | None:
    """The memory that can still be allocated; None if the system does not tell."""
    if sys.platform != "linux":
        return None
    fields = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    available = next(int(size) for name, size, *_ in fields if name == "MemAvailable:") * 1024
    try:
        limit = (_CGROUP_V2 / "memory.max").read_text().strip()
        used = int((_CGROUP_V2 / "memory.current").read_text())
        stat = dict(line.split() for line in (_CGROUP_V2 / "memory.stat").read_text().splitlines())
    except FileNotFoundError:
        return available
    if limit == "max":
        return available
    # The pages of files count as used, but the kernel frees them when memory is needed.
    return min(available, int(limit) - used + int(stat.get("inactive_file", 0)))


def yield_to_other_threads() -> None:
    """Make the calling thread use little of a core while other threads compute."""
    if sys.platform == "linux":
        # On Linux each thread has its own nice value. 0 is the calling thread. Only root may lower
        # a nice value.
        niceness = max(_STAGING_NICENESS, os.getpriority(os.PRIO_PROCESS, 0))
        os.setpriority(os.PRIO_PROCESS, 0, niceness)


def _write_shard(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raises ReleaseError and OSError."""
    plain: dict[str, torch.Tensor] = {}
    places: set[int] = set()
    try:
        for name, tensor in tensors.items():
            whole = tensor.detach().cpu().contiguous()
            place = whole.untyped_storage().data_ptr()
            # The library refuses tensors that share memory, such as two views of a larger tensor.
            plain[name] = whole.clone() if place in places else whole
            places.add(place)
        save_file(plain, path, metadata={"format": "pt"})
    # The library raises KeyError for a dtype that no shard can store, such as complex128. Torch
    # raises NotImplementedError for a tensor without data, on the device `meta`.
    except (KeyError, NotImplementedError) as error:
        reason = f"a tensor cannot be stored: {first_line(error)}"
        raise ReleaseError(f"{path.name}: {reason}") from None
    except SafetensorError as error:
        # The library tells the number of the system's error only in this text.
        number = re.search(r"os error (\d+)", str(error))
        raise OSError(int(number[1]) if number else None, str(error)) from error
