"""Releases with one fault each, made of a good one. Where a digest would tell, the manifest is
sealed again, so that the fault is found for what it is."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from serving.weights import publish
from serving.weights.release import (
    RELEASE_FILE,
    Release,
    digest_file,
    files_digest,
    read_header,
)
from serving.weights.release_store import load_release, next_number
from serving.weights.shards import read_tensors


@dataclass(frozen=True, kw_only=True)
class BadRelease:
    release_id: str
    named: tuple[str, ...]
    """What one reason must name: the file, and the tensor where the fault is in one."""


Fault = Callable[[Path, Release], BadRelease]


def flip_a_bit(pipeline_dir: Path, good: Release) -> BadRelease:
    file, name = _place(good)
    folder = _copied(pipeline_dir, good)
    content = bytearray((folder / file).read_bytes())
    content[read_header(folder / file)[name].begin] ^= 1
    (folder / file).write_bytes(content)
    return BadRelease(release_id=folder.name, named=(file,))


def add_a_token(pipeline_dir: Path, good: Release) -> BadRelease:
    folder = _copied(pipeline_dir, good)
    _edit(
        folder / "tokenizer.json",
        lambda content: content["model"]["vocab"].update({"beyond": 10**6}),
    )
    return BadRelease(release_id=_sealed(folder), named=("tokenizer.json", "'beyond'"))


def change_the_architecture(pipeline_dir: Path, good: Release) -> BadRelease:
    folder = _copied(pipeline_dir, good)
    strange = {"architectures": ["Strange"], "model_type": "strange"}
    _edit(folder / "config.json", lambda content: content.update(strange))
    return BadRelease(release_id=_sealed(folder), named=("config.json", "strange"))


def cut_a_row_off(pipeline_dir: Path, good: Release) -> BadRelease:
    return _with_other_weights(pipeline_dir, good, lambda tensor: tensor[:-1])


def store_integers(pipeline_dir: Path, good: Release) -> BadRelease:
    return _with_other_weights(pipeline_dir, good, lambda tensor: tensor.to(torch.int64), "I64")


def put_a_nan(pipeline_dir: Path, good: Release) -> BadRelease:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor.view(-1)[-1] = torch.nan
        return tensor

    return _with_other_weights(pipeline_dir, good, change, "NaN")


OF_FILES: dict[str, Fault] = {
    "wrong sha256": flip_a_bit,
    "tokenizer that does not fit": add_a_token,
}
"""What else the server finds in files: integration/test_publish_release.py."""
OF_WEIGHTS: dict[str, Fault] = {
    "wrong shape": cut_a_row_off,
    "wrong dtype": store_integers,
    "NaN": put_a_nan,
    "other architecture": change_the_architecture,
}
"""For engines that have a network."""


def _place(good: Release) -> tuple[str, str]:
    """The last shard, and a tensor in it that a reason names even if it names a few."""
    file = max(entry.file for entry in good.tensors.values())
    return file, next(name for name, entry in good.tensors.items() if entry.file == file)


def _edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_bytes())
    change(content)
    path.write_text(json.dumps(content))


def _copied(pipeline_dir: Path, good: Release) -> Path:
    """The release once more, under the next number."""
    folder = pipeline_dir / ".copied"
    shutil.copytree(pipeline_dir / good.id, folder)
    return pipeline_dir / _sealed(folder)


def _sealed(folder: Path) -> str:
    """The id under which a manifest vouches for the files as they are now; the folder's too."""
    release = load_release(folder)
    files = {name: digest_file(folder / name) for name in release.files}
    release_id = f"r{next_number(folder.parent):06d}-{files_digest(files)}"
    sealed = release.model_copy(update={"id": release_id, "files": files})
    (folder / RELEASE_FILE).write_text(sealed.model_dump_json())
    folder.rename(folder.parent / release_id)
    return release_id


def _with_other_weights(
    pipeline_dir: Path,
    good: Release,
    change: Callable[[torch.Tensor], torch.Tensor],
    *said: str,
) -> BadRelease:
    folder = pipeline_dir / good.id
    _, name = _place(good)
    tensors = read_tensors(folder, {each: entry.file for each, entry in good.tensors.items()})
    # Publishing refuses some of these; but another version may have published them.
    with patch.object(publish, "check_network", return_value=()):
        release = publish.publish_state_dict(
            pipeline_dir, tensors | {name: change(tensors[name])}, files_dir=folder
        )
    return BadRelease(release_id=release.id, named=(release.tensors[name].file, name, *said))
