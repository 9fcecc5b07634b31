"""How much of a release is read, and releases in which little changed."""

from collections.abc import Iterable
from pathlib import Path

import torch

from serving.weights.publish import publish_state_dict
from serving.weights.release import Release
from serving.weights.shards import read_tensors


def bytes_read(*pids: int) -> int:
    """By `read` and its kin so far; what is read through a mapping is not in it."""
    lines = [Path(f"/proc/{pid}/io").read_text() for pid in pids]
    return sum(int(line.split()[1]) for line in lines)


def stored_bytes(pipeline_dir: Path, release: Release) -> int:
    return sum(entry.size for entry in release.files.values())


def with_changed(pipeline_dir: Path, release: Release, names: Iterable[str]) -> tuple[Release, int]:
    """The release once more with other values in some tensors; how many bytes these take."""
    folder = pipeline_dir / release.id
    weight_map = {name: entry.file for name, entry in release.tensors.items()}
    tensors = {name: tensor.clone() for name, tensor in read_tensors(folder, weight_map).items()}
    with torch.no_grad():
        for name in names:
            tensors[name].mul_(-1.1)
    changed = publish_state_dict(pipeline_dir, tensors, files_dir=folder)
    return changed, sum(tensors[name].nbytes for name in names)
