"""Reads a checkpoint folder that `save_pretrained` of `transformers` wrote: finds the tensors and
files in this folder, and computes their digests.

This module imports torch only if the folder has `.bin` shards.
"""

from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from pathlib import Path

from serving.errors import ReleaseError
from serving.weights.headers import digest_file, digest_shard, read_header
from serving.weights.index import (
    BIN_INDEX_FILE,
    INDEX_FILE,
    INDEX_FILES,
    has_bin,
    read_index,
)
from serving.weights.release import RELEASE_FILE, Release, TensorEntry, files_digest, read_json
from serving.weights.verify import check_tie

_COMPANION_SUFFIXES = {".json", ".txt", ".model", ".jinja", ".md"}
_NOT_COMPANIONS = {
    RELEASE_FILE,
    "trainer_state.json",
    "checkpoint.json",
    *INDEX_FILES,
}
_SOURCES = ((INDEX_FILE, "model.safetensors"), (BIN_INDEX_FILE, "pytorch_model.bin"))
"""Where weights may be, in the order of the search. In each pair, the first name is the name of an
index file. If this file is missing, the weights may be in a single shard with the second name. A
`.bin` shard is a pickle. Safetensors come first, so if a folder has both formats, no pickle is
read."""


def checkpoint_weight_map(source: Path) -> dict[str, str]:
    """Maps each tensor name to the file name of its shard.

    The map comes from the index, a file of the checkpoint that lists the tensors of each shard. A
    checkpoint without an index must have exactly one shard, and the tensor names are then read from
    this shard. Raises ReleaseError if there are no weights, or if the index or the single shard is
    not valid.
    """
    if not source.is_dir():
        raise ReleaseError(f"{source} is not a folder")
    for index_file, single in _SOURCES:
        index = read_index(source, index_file)
        if index is not None:
            return index.weight_map
        if (source / single).is_file():
            return dict.fromkeys(_names(source / single), single)
    raise ReleaseError(
        f"{source} holds no weights; it needs one of {', '.join(INDEX_FILES)}, "
        "model.safetensors and pytorch_model.bin"
    )


def _names(shard: Path) -> Collection[str]:
    if not has_bin([shard.name]):
        return read_header(shard)
    from serving.weights.shards import read_bin

    return read_bin(shard)


def manifest_of_folder(source: Path, pipeline: str) -> Release:
    """Makes a manifest for a checkpoint folder that is served without being published.

    The manifest is not written to disk, and its release number is 0. Raises ReleaseError.
    """
    tensors: dict[str, TensorEntry] = {}
    names = {*INDEX_FILES, *(path.name for path in companions(source))}
    files = {name: digest_file(source / name) for name in names if (source / name).is_file()}
    for shard in sorted(set(checkpoint_weight_map(source).values())):
        files[shard], found = digest_shard(source / shard)
        tensors |= found
    release = Release(
        id=f"r000000-{files_digest(files)}",
        pipeline=pipeline,
        created_at=utc_now(),
        files=files,
        tensors=tensors,
        tied=tied_head(source, tensors),
    )
    if reasons := check_tie(source, release):
        raise ReleaseError(*reasons)
    return release


def companions(folder: Path) -> list[Path]:
    """The small files that a release has in addition to the weights: config, tokenizer and README.
    Code and pickles are left out."""
    return sorted(
        path
        for path in folder.iterdir()
        if path.suffix in _COMPANION_SUFFIXES
        and path.name not in _NOT_COMPANIONS
        and not path.name.startswith(".")
        and path.is_file()
    )


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
    if read_json(folder / "config.json").get("tie_word_embeddings") is not True:
        return {}
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    return {head: embedding} if head not in tensors and embedding in tensors else {}
