"""Reads a checkpoint folder that `save_pretrained` of `transformers` wrote: finds the tensors and
files in this folder, and computes their digests.

This module imports torch only if the folder has `.bin` shards.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from serving.errors import ReleaseError
from serving.weights.headers import DTYPE_BYTES, digest_file, digest_shard, read_header
from serving.weights.index import (
    INDEX_FILES,
    IndexMetadata,
    StoredWeights,
    WeightsIndex,
    read_index,
)
from serving.weights.release import RELEASE_FILE, FileEntry, Release, TensorEntry

_COMPANION_SUFFIXES = {".json", ".txt", ".model", ".jinja", ".md"}
_NOT_COMPANIONS = {
    RELEASE_FILE,
    "trainer_state.json",
    "checkpoint.json",
    *INDEX_FILES.values(),
}


def checkpoint_weight_map(source: Path) -> dict[str, str]:
    """Maps each tensor name to the file name of its shard.

    The map comes from the index, a file of the checkpoint that lists the tensors of each shard. A
    checkpoint without an index must have exactly one shard, and the tensor names are then read from
    this shard. Raises ReleaseError if there are no weights, or if a shard is missing.
    """
    if not source.is_dir():
        raise ReleaseError(f"{source} is not a folder")
    index = read_index(source)
    if index is not None:
        missing = [shard for shard in index.shards if not (source / shard).is_file()]
        if missing:
            raise ReleaseError(
                *(f"{shard}: missing, although the index names it" for shard in missing)
            )
        return index.weight_map
    single = source / "model.safetensors"
    if single.is_file():
        return dict.fromkeys(read_header(single), single.name)
    single = source / "pytorch_model.bin"
    if single.is_file():
        from serving.weights.shards import names_in_bin

        return dict.fromkeys(names_in_bin(single), single.name)
    raise ReleaseError(
        f"{source} holds no weights; it needs one of {', '.join(INDEX_FILES.values())}, "
        "model.safetensors and pytorch_model.bin"
    )


def manifest_of_folder(source: Path, pipeline: str) -> Release:
    """Makes a manifest for a checkpoint folder that is served without being published.

    The manifest is not written to disk, and its release number is 0. Raises ReleaseError.
    """
    weight_map = checkpoint_weight_map(source)
    weights = digest_weights(source, weight_map)
    files = dict(weights.files)
    for path in companions(source):
        files[path.name] = digest_file(path)
    for name in INDEX_FILES.values():
        if (source / name).is_file():
            files[name] = digest_file(source / name)
    return Release(
        id=f"r000000-{files_digest(files)}",
        pipeline=pipeline,
        created_at=utc_now(),
        files=files,
        tensors=weights.tensors,
        tied=tied_head(source, weights.tensors),
    )


def companions(folder: Path) -> list[Path]:
    """The small files that a release has in addition to the weights: config, tokenizer and README.
    Code and pickles are left out.

    Raises ReleaseError if a `.json` file is not valid JSON.
    """
    if not folder.is_dir():
        raise ReleaseError(f"{folder} is not a folder")
    found = sorted(
        path
        for path in folder.iterdir()
        if path.suffix in _COMPANION_SUFFIXES
        and path.name not in _NOT_COMPANIONS
        and not path.name.startswith(".")
        and path.is_file()
    )
    for path in found:
        if path.suffix == ".json":
            try:
                json.loads(path.read_bytes())
            except ValueError as error:
                raise ReleaseError(f"{path}: not valid JSON: {error}") from None
    return found


def digest_weights(folder: Path, weight_map: dict[str, str]) -> StoredWeights:
    """Computes the size and sha256 of each shard, and the digest of each tensor.

    `tied` in the result is empty, because a shard does not say which names share a tensor. Raises
    ReleaseError if the shards lack a tensor that `weight_map` names, or hold a tensor that
    `weight_map` does not name.
    """
    files: dict[str, FileEntry] = {}
    tensors: dict[str, TensorEntry] = {}
    reasons: list[str] = []
    for shard in sorted(set(weight_map.values())):
        if shard.endswith(".bin"):
            from serving.weights.shards import digest_bin

            files[shard], found = digest_file(folder / shard), digest_bin(folder / shard)
        else:
            files[shard], found = digest_shard(folder / shard)
        expected = {name for name, file in weight_map.items() if file == shard}
        reasons += [
            f"{shard}: tensor {name}: in the index, not in the shard"
            for name in sorted(expected - found.keys())
        ]
        reasons += [
            f"{shard}: tensor {name}: in the shard, not in the index"
            for name in sorted(found.keys() - expected)
        ]
        tensors |= found
    if reasons:
        raise ReleaseError(*reasons)
    total = sum(math.prod(entry.shape) * DTYPE_BYTES[entry.dtype] for entry in tensors.values())
    index = WeightsIndex(metadata=IndexMetadata(total_size=total), weight_map=weight_map)
    return StoredWeights(index=index, files=files, tensors=tensors, tied={})


def files_digest(files: Mapping[str, FileEntry]) -> str:
    """The second half of a release id: the first 8 hex digits of a sha256 that covers the names and
    sha256s of all files."""
    listed = "".join(f"{name}\0{entry.sha256}\n" for name, entry in sorted(files.items()))
    return hashlib.sha256(listed.encode()).hexdigest()[:8]


def utc_now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def tied_head(folder: Path, tensors: Mapping[str, TensorEntry]) -> dict[str, str]:
    """The dict `{head: embedding}` of two tensor names, if the head (the last layer of the model)
    and the embedding are *tied*: the head uses the tensor of the embedding, and the checkpoint
    stores only the embedding. In all other cases, the dict is empty.

    The setting `tie_word_embeddings` of the config says whether the head and the embedding are
    tied. If the config does not have this setting, the dict is empty, because the default depends
    on the architecture. In a Llama, the default is that they are not tied. So if a Llama checkpoint
    has neither a head nor this setting, the checkpoint is incomplete, and `check_network` refuses
    the checkpoint.
    """
    path = folder / "config.json"
    config = json.loads(path.read_bytes()) if path.is_file() else None
    if not isinstance(config, dict) or config.get("tie_word_embeddings") is not True:
        return {}
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    return {head: embedding} if head not in tensors and embedding in tensors else {}
