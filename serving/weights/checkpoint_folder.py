"""Reads any checkpoint folder, as `save_pretrained` writes it: which tensors, which files, digests.

Never imports torch for safetensors; `.bin` shards need it.
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

_COMPANIONS = {".json", ".txt", ".model", ".jinja", ".md"}
_NOT_COMPANIONS = {
    RELEASE_FILE,
    "trainer_state.json",
    "checkpoint.json",
    *INDEX_FILES.values(),
}


def checkpoint_weight_map(source: Path) -> dict[str, str]:
    """Tensor name → shard of any checkpoint folder, with an index or with one shard and none.

    Raises ReleaseError when there are no weights, or a shard is missing.
    """
    if not source.is_dir():
        raise ReleaseError(f"{source} is not a folder")
    index = read_index(source)
    if index is not None:
        missing = [shard for shard in index.shards if not (source / shard).is_file()]
        if missing:
            raise ReleaseError(
                *(f"{shard}: missing, though the index names it" for shard in missing)
            )
        return index.weight_map
    single = source / "model.safetensors"
    if single.is_file():
        return dict.fromkeys(read_header(single), single.name)
    single = source / "pytorch_model.bin"
    if single.is_file():
        from serving.weights.shards import digest_bin

        return dict.fromkeys(digest_bin(single), single.name)
    raise ReleaseError(
        f"{source} holds no weights: neither {' nor '.join(INDEX_FILES.values())} "
        "nor model.safetensors nor pytorch_model.bin"
    )


def manifest_of_folder(source: Path, pipeline: str) -> Release:
    """A manifest, in memory, for a checkpoint folder that is served as it is: number 0."""
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
    """Config, tokenizer and notes: small files beside the weights. No code, no pickles."""
    if not folder.is_dir():
        raise ReleaseError(f"{folder} is not a folder")
    found = sorted(
        path
        for path in folder.iterdir()
        if path.suffix in _COMPANIONS
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
    """Size and sha256 of each shard, a digest of each tensor; shards alone tell of no ties. Raises
    ReleaseError where shards and `weight_map` differ."""
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
    """The second half of a release id: 8 hex of sha256 over the sorted `(file, sha256)` list."""
    listed = "".join(f"{name}\0{entry.sha256}\n" for name, entry in sorted(files.items()))
    return hashlib.sha256(listed.encode()).hexdigest()[:8]


def utc_now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def tied_head(folder: Path, tensors: Mapping[str, TensorEntry]) -> dict[str, str]:
    """A checkpoint without an output head uses its embedding as one, if its config says so.

    A config that is silent means what its family does. Of a Llama that is a head that is missing;
    where it is a tie, the engine that builds the network knows it and needs no word of ours.
    """
    path = folder / "config.json"
    config = json.loads(path.read_bytes()) if path.is_file() else None
    if not isinstance(config, dict) or config.get("tie_word_embeddings") is not True:
        return {}
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    return {head: embedding} if head not in tensors and embedding in tensors else {}
