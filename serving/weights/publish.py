"""Publishes a release: writes the release into the pipeline's folder in such a way that a reader
sees either the complete release or nothing.

The files are written into a folder with a temporary name, in this order: the shards, the config,
tokenizer and README files, the index, the manifest. Each file is fsynced, and after that the
folder. Then the folder is renamed, and its parent folder is fsynced. A reader sees the release only
after the rename.

If the process is killed before the rename, the folder with the temporary name stays. The next
publication, the next `prune`, or the next start of the server removes it.

The files of a release are copies of the caller's files, never links to them. The caller may change
the original files later, but a release must not change.
"""

import errno
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from serving.errors import NotEnoughSpace, ReleaseError
from serving.weights.atomic_file import fsync_dir, write_atomically
from serving.weights.checkpoint_folder import (
    checkpoint_weight_map,
    companions,
    tied_head,
    utc_now,
)
from serving.weights.headers import digest_file
from serving.weights.index import INDEX_FILE, has_bin
from serving.weights.release import RELEASE_FILE, Lineage, Probe, Release, files_digest
from serving.weights.release_removal import sweep_locked
from serving.weights.release_store import UNFINISHED, next_number, release_lock
from serving.weights.verify import check_network

if TYPE_CHECKING:
    import torch

MAX_SHARD_BYTES = 2 * 10**9
SPARE_BYTES = 64 * 2**20
"""A release is published only if this many bytes of the disk are still free afterwards, because the
job store and the logs need space on the same disk."""


class ManifestFields(TypedDict, total=False):
    """The fields of a manifest that the caller knows, see `Release`."""

    lineage: Lineage
    evaluation: dict[str, Any] | None
    probe: Probe | None


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
    if not any(path.name == "config.json" for path in companion_files):
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
        with _unfinished_folder(pipeline_dir) as folder:
            weights = shards.write_shards(tensors, folder, max_shard_bytes=max_shard_bytes)
            for path in companion_files:
                _copy(path, folder / path.name)
            write_atomically(folder / INDEX_FILE, weights.index.to_json())
            names = (*(path.name for path in companion_files), INDEX_FILE)
            files = weights.files | {name: digest_file(folder / name) for name in names}
            number = next_number(pipeline_dir)
            release = Release(
                id=f"r{number:06d}-{files_digest(files)}",
                pipeline=pipeline_dir.name,
                created_at=utc_now(),
                files=files,
                tensors=weights.tensors,
                tied=tied_head(folder, weights.tensors) | weights.tied,
                **manifest,
            )
            if reasons := check_network(folder, release):
                raise ReleaseError(*reasons)
            write_atomically(folder / RELEASE_FILE, release.model_dump_json(indent=2) + "\n")
            os.rename(folder, pipeline_dir / release.id)
            fsync_dir(pipeline_dir)
    return release


@contextmanager
def _unfinished_folder(pipeline_dir: Path) -> Iterator[Path]:
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


def _copy(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)
    with target.open("rb") as file:
        os.fsync(file.fileno())
