"""Publishes a release: writes the release into the pipeline's folder in such a way that a reader
sees either the complete release or nothing.

The files are written into a folder with a temporary name. Each file is fsynced, and after that the
folder. Then the folder is renamed, and its parent folder is fsynced. A reader sees the release only
after the rename.

If the process is killed before the rename, the folder with the temporary name stays. The next
publication, the next `prune`, or the next start of the server removes it.

The files of a release are copies of the caller's files, never links to them. The caller may change
the original files later, but a release must not change. Only `adopt_release` may link, to files of
the hub, which never change.
"""

import errno
import os
import shutil
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from serving.errors import NotEnoughSpace, ReleaseError
from serving.weights.atomic_file import fsync
from serving.weights.network import CONFIG_FILE
from serving.weights.release import (
    BIN_INDEX_FILE,
    INDEX_FILE,
    INDEX_FILES,
    RELEASE_FILE,
    Lineage,
    Probe,
    Release,
    TensorEntry,
    WeightsIndex,
    digest_file,
    digest_shard,
    files_digest,
    has_bin,
    read_header,
    read_index,
    read_json,
)
from serving.weights.release_store import (
    UNFINISHED,
    is_checkpoint,
    load_release,
    next_number,
    release_ids,
    release_lock,
    sweep_locked,
)
from serving.weights.verify import TIED, check_network, check_tie, verify_layout, verify_shards

if TYPE_CHECKING:
    import torch

MAX_SHARD_BYTES = 2 * 10**9
SPARE_BYTES = 64 * 2**20
"""A release is published only if this many bytes of the disk are still free afterwards, because the
job store and the logs need space on the same disk."""

_COMPANION_SUFFIXES = {".json", ".txt", ".model", ".jinja", ".md"}
_NOT_COMPANIONS = {RELEASE_FILE, "trainer_state.json", "checkpoint.json", *INDEX_FILES}
_SOURCES = ((INDEX_FILE, "model.safetensors"), (BIN_INDEX_FILE, "pytorch_model.bin"))
"""Where weights may be, in the order of the search. In each pair, the first name is the name of an
index file. If this file is missing, the weights may be in a single shard with the second name. A
`.bin` shard is a pickle. Safetensors come first, so if a folder has both formats, no pickle is
read."""


class ManifestFields(TypedDict, total=False):
    """The fields of a manifest that the caller knows, see `Release`."""

    lineage: Lineage
    evaluation: dict[str, Any] | None
    probe: Probe | None


def servable_folder(folder: Path, pipeline_dir: Path) -> Path:
    """`folder`, or a release that is published from it if it is a checkpoint with `.bin` shards. No
    engine reads such shards, because they are pickles. Raises ReleaseError and OSError."""
    if is_checkpoint(folder, pipeline_dir) and has_bin(checkpoint_weight_map(folder).values()):
        return pipeline_dir / publish_folder(pipeline_dir, folder).id
    return folder


def publish_folder(pipeline_dir: Path, source: Path, **manifest: Unpack[ManifestFields]) -> Release:
    """Publish a checkpoint folder that `save_pretrained` wrote, with `.safetensors` or `.bin`
    shards. Its tensors are written to new safetensors shards. Raises the errors of
    `publish_state_dict`."""
    from serving.weights import shards

    weight_map = checkpoint_weight_map(source)
    if not has_bin(weight_map.values()):
        tensors = shards.read_tensors(source, weight_map)
    else:
        # In a shard, the embedding comes before a head that is the same tensor, as in the network.
        # Only the first name is kept, and some engines would find no embedding without it.
        tensors = {}
        for shard in sorted(set(weight_map.values())):
            tensors |= shards.read_bin(source / shard)
    return publish_state_dict(pipeline_dir, tensors, files_dir=source, **manifest)


def publish_state_dict(
    pipeline_dir: Path,
    tensors: "Mapping[str, torch.Tensor]",
    *,
    files_dir: Path,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    **manifest: Unpack[ManifestFields],
) -> Release:
    """Publish weights from memory, together with the config and tokenizer files of `files_dir`.

    `pipeline_dir` is `<home>/releases/<pipeline>`; it is created if it does not exist. The release
    is written to `pipeline_dir / release.id`. `max_shard_bytes` limits the size of a shard.

    Tensors that are not contiguous or not on the CPU are copied before they are written. At any
    time, memory holds the copies for at most one shard. Raises ReleaseError if the weights cannot
    be published, and NotEnoughSpace if the disk has too little space for them. After an error, the
    unfinished folder is removed.
    """
    from serving.weights import shards

    companion_files = companions(files_dir)
    if not any(path.name == CONFIG_FILE for path in companion_files):
        raise ReleaseError(
            f"{files_dir} has no config.json, and without this file no engine can load the "
            "weights; save the model in this folder with save_pretrained"
        )
    pipeline_dir.mkdir(parents=True, exist_ok=True)
    with release_lock(pipeline_dir):
        sweep_locked(pipeline_dir)
        needed = sum(tensor.nbytes for tensor in tensors.values())
        needed += sum(path.stat().st_size for path in companion_files)
        free = shutil.disk_usage(pipeline_dir).free
        if free < needed + SPARE_BYTES:
            raise NotEnoughSpace(
                f"{pipeline_dir}: a release of {needed:,} bytes does not fit: {free:,} bytes are "
                f"free, and {SPARE_BYTES:,} of them must stay free; prune releases or move the "
                "state folder"
            )
        with unfinished_folder(pipeline_dir) as folder:
            files, stored, tied = shards.write_shards(
                tensors, folder, max_shard_bytes=max_shard_bytes
            )
            for path in companion_files:
                shutil.copyfile(path, folder / path.name)
            index = WeightsIndex(
                metadata={"total_size": sum(tensors[name].nbytes for name in stored)},
                weight_map={name: entry.file for name, entry in stored.items()},
            )
            (folder / INDEX_FILE).write_text(index.model_dump_json(indent=2), "utf-8")
            names = (*(path.name for path in companion_files), INDEX_FILE)
            files |= {name: digest_file(folder / name) for name in names}
            number = next_number(pipeline_dir)
            release = Release(
                id=f"r{number:06d}-{files_digest(files)}",
                pipeline=pipeline_dir.name,
                created_at=datetime.now(UTC).isoformat(timespec="seconds"),
                files=files,
                tensors=stored,
                tied=tied_head(folder, stored) | tied,
                **manifest,
            )
            if reasons := check_network(folder, release):
                raise ReleaseError(*reasons)
            _finish(folder, pipeline_dir, release)
    return release


def adopt_release(
    pipeline_dir: Path, release: Release, put_file: Callable[[str, Path], None]
) -> Path:
    """Publish a release that was made elsewhere, and return its folder.

    `put_file(name, path)` puts the file `name` of the release at `path`, or does nothing if it has
    no such file. It may make a hard link to a file that nothing ever writes to again.

    The release gets the next number of this folder, because its own number may be taken here. If
    it was adopted before and is still there, this returns the folder from then. Raises ReleaseError
    with all reasons if the files do not match the manifest, and NotEnoughSpace. After an error,
    nothing is left.
    """
    if release.pipeline != (pipeline := pipeline_dir.name):
        raise ReleaseError(
            f"{RELEASE_FILE}: the release is of the pipeline {release.pipeline!r}, not {pipeline!r}"
        )
    pipeline_dir.mkdir(parents=True, exist_ok=True)
    digest = release.id.rpartition("-")[2]
    with release_lock(pipeline_dir):
        sweep_locked(pipeline_dir)
        for known in (each for each in release_ids(pipeline_dir) if each.endswith(digest)):
            with suppress(ReleaseError):  # a damaged release is not the same
                same = load_release(pipeline_dir / known).model_copy(update={"id": release.id})
                if same == release:
                    return pipeline_dir / known
        with unfinished_folder(pipeline_dir) as folder:
            for name in release.files:
                put_file(name, folder / name)
            if reasons := verify_layout(folder, release) or verify_shards(folder, release):
                raise ReleaseError(*reasons)
            number = next_number(pipeline_dir)
            adopted = release.model_copy(update={"id": f"r{number:06d}-{digest}"})
            _finish(folder, pipeline_dir, adopted)
    return pipeline_dir / adopted.id


def _finish(folder: Path, pipeline_dir: Path, release: Release) -> None:
    """Writes the manifest into the unfinished `folder`, and makes the release visible."""
    (folder / RELEASE_FILE).write_text(release.model_dump_json(indent=2), "utf-8")
    make_visible(folder, pipeline_dir / release.id)


def make_visible(folder: Path, target: Path) -> None:
    """Renames the complete release in `folder` to `target`, so that it survives a power cut."""
    for written in (*folder.iterdir(), folder):
        fsync(written)
    os.rename(folder, target)
    fsync(target.parent)


@contextmanager
def unfinished_folder(pipeline_dir: Path) -> Iterator[Path]:
    folder = pipeline_dir / f"{UNFINISHED}{uuid.uuid4().hex[:8]}"
    folder.mkdir()
    try:
        yield folder
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NotEnoughSpace(
                f"{pipeline_dir}: the disk filled up while the release was written, so the "
                "unfinished release was removed; prune releases or move the state folder"
            ) from error
        raise


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
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
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
    if read_json(folder / CONFIG_FILE).get("tie_word_embeddings") is not True:
        return {}
    head, embedding = TIED
    return {head: embedding} if head not in tensors and embedding in tensors else {}
