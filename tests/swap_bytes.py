"""How much of a release is read, and releases in which little changed."""

import re
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from serving.weights.publish import publish_state_dict
from serving.weights.release import Release
from serving.weights.shards import read_tensors


def bytes_read(*pids: int) -> int:
    """By `read` and its kin so far; what is read through a mapping is not in it."""
    lines = [Path(f"/proc/{pid}/io").read_text() for pid in pids]
    return sum(int(line.split()[1]) for line in lines)


def staged_bytes(caplog: pytest.LogCaptureFixture, release_id: str) -> int:
    """How many bytes of shards the torch engine has read for the release, as it logs with INFO."""
    found = re.search(rf"staged {release_id} .* read (\d+) bytes", caplog.text)
    assert found is not None
    return int(found[1])


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
