"""Copies of folders with `.bin` shards. The copies have safetensors shards.

The copies are in the folder `.converted` of the pipeline's folder, one folder for each release id:

    .converted/r000003-1f3ac9d2/r000001-5e7b20c4/   a copy of release r000003-1f3ac9d2
    .converted/r000003-1f3ac9d2/in-use              locked (flock(2)) by each server that uses it

Later starts of the server use a copy again. A copy is removed together with its release. The copy
of anything that is not a release of the pipeline, such as a checkpoint folder, is removed after
another copy has been made, but not while a server uses it.
"""

import fcntl
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from serving.errors import ReleaseError
from serving.weights import release_store
from serving.weights.checkpoint_folder import checkpoint_weight_map
from serving.weights.publish import publish_state_dict
from serving.weights.release import Release, tensor_digest
from serving.weights.verify import verify_release, wrong_digest

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_IN_USE = "in-use"
"""Opened for reading too: on NFS, only a file that can be read can have a shared lock."""


class ConvertedCopies:
    """Finds and makes copies for one server. The server uses all copies that it has got from
    `copy_of`, until it calls `close`."""

    def __init__(self, releases_dir: Path) -> None:
        self._copies = releases_dir / release_store.CONVERTED
        self._used: dict[Path, BinaryIO] = {}
        """The folder of a release's copies → the locked file `in-use` in this folder."""

    def copy_of(self, folder: Path, release: Release) -> tuple[Release, Path]:
        """The manifest with which a copy of `folder` is served, and the folder of the copy.

        `release` is the manifest of `folder`. Its id contains a digest of all files, so the id says
        whether a copy is up to date. The copy is served under the same id. A copy that was damaged
        is made again. Raises ReleaseError and OSError.
        """
        self._copies.mkdir(parents=True, exist_ok=True)
        target = self._copies / release.id
        with release_store.release_lock(self._copies):  # another server may make the same copy
            folders = [target / release_id for release_id in release_store.release_ids(target)]
            whole = [
                release_store.load_release(each) for each in folders if not verify_release(each)
            ]
            if not whole:
                _remove_unless_used(target)
                logger.info("%s has .bin shards; they are converted once, into %s", folder, target)
                whole = [_convert(folder, release, target)]
                _remove_unneeded(self._copies, kept=target)
            if target not in self._used:
                file = (target / _IN_USE).open("a+b")
                fcntl.flock(file, fcntl.LOCK_SH)
                self._used[target] = file
        copy = whole[-1]
        # In the copy, a name of an old alias may itself be an alias.
        tied = {alias: copy.tied.get(name, name) for alias, name in release.tied.items()}
        update = {"files": copy.files, "tensors": copy.tensors, "tied": {**tied, **copy.tied}}
        return release.model_copy(update=update), target / copy.id

    def close(self) -> None:
        """Other servers may remove the copies from now on."""
        while self._used:
            self._used.popitem()[1].close()


def remove_unneeded_copies(releases_dir: Path) -> None:
    """Remove the copies of anything that is not a release of the pipeline, if no server uses them.
    Such a copy may be of a removed release, if the process was killed that removed the release."""
    copies = releases_dir / release_store.CONVERTED
    if copies.is_dir():
        with release_store.release_lock(copies):
            _remove_unneeded(copies)


def _remove_unneeded(copies: Path, kept: Path | None = None) -> None:
    for each in copies.iterdir():
        if each != kept and not (copies.parent / each.name).is_dir():
            _remove_unless_used(each)


def _convert(folder: Path, release: Release, target: Path) -> Release:
    """Publish a copy of `folder` in the folder `target`. Returns the manifest of the copy.

    If the manifest `release` lists tensors, exactly these are converted, and each must be as the
    manifest says. The folder may also hold other weights, which nobody has checked.
    """
    from serving.weights import shards  # torch, which is slow to import

    weight_map = {name: entry.file for name, entry in release.tensors.items()}
    tensors = shards.read_bin_shards(folder, weight_map or checkpoint_weight_map(folder))
    if reasons := _wrong_tensors(release, tensors):
        raise ReleaseError(*reasons)
    # The engine compares the tensors with the network when it loads them. An engine may know
    # networks that `check_network` does not know.
    return publish_state_dict(target, tensors, files_dir=folder, checks_network=False)


def _wrong_tensors(release: Release, tensors: "Mapping[str, torch.Tensor]") -> list[str]:
    from serving.weights import shards

    reasons = []
    for name, entry in release.tensors.items():
        dtype, shape = shards.DTYPES[tensors[name].dtype], tuple(tensors[name].shape)
        digest = tensor_digest(shards.tensor_bytes(tensors[name]))
        if (dtype, shape) != (entry.dtype, entry.shape):
            reasons.append(
                f"{entry.file}: tensor {name}: {dtype} {list(shape)} instead of "
                f"{entry.dtype} {list(entry.shape)}"
            )
        elif digest != entry.digest:
            reasons.append(wrong_digest(entry.file, name, found=digest, expected=entry.digest))
    return reasons


def _remove_unless_used(copies: Path) -> None:
    """Remove the folder of a release's copies, if no server uses it. The caller must hold the lock
    of `.converted`."""
    if not copies.is_dir():
        return
    try:
        with (copies / _IN_USE).open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(copies)
    except BlockingIOError:
        logger.info("%s stays, because a server uses it", copies)
    except OSError as error:
        logger.warning("%s cannot be removed: %s", copies, error)
