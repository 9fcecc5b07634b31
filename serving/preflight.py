"""The preflight of a swap: checks on disk whether a folder may be served.

No engine reads `.bin` shards, because they are pickles. But a checkpoint folder may have such
shards, and also a release that an earlier version of hotpush has published. The server then makes a
copy with safetensors shards, and the engine reads this copy.

The copies are in the folder `.converted` of the pipeline's folder. Later starts of the server use
them again. A copy is removed together with its release. The copy of anything that is not a release
of the pipeline, such as a checkpoint folder, is removed when another copy is made.
"""

import logging
import shutil
from pathlib import Path

from serving.engine import Engine
from serving.errors import ReleaseError
from serving.weights import release_store
from serving.weights.checkpoint_folder import manifest_of_folder
from serving.weights.index import has_bin
from serving.weights.publish import publish_folder
from serving.weights.release import RELEASE_FILE, Release
from serving.weights.verify import verify_layout, verify_release

logger = logging.getLogger(__name__)


def read_folder(
    folder: Path, engine: Engine, releases_dir: Path, pipeline: str
) -> tuple[Release, Path]:
    """Checks a release or a checkpoint folder. Returns its manifest, and the folder that the engine
    must read: `folder`, or a copy of it with safetensors shards.

    Raises ReleaseError if `folder` has faults or cannot be converted, and OSError.
    """
    release = _checked(folder, engine, releases_dir, pipeline)
    if has_bin(release.files):
        return _converted(release, folder, releases_dir)
    return release, folder


def _checked(folder: Path, engine: Engine, releases_dir: Path, pipeline: str) -> Release:
    is_inside = folder.resolve().is_relative_to(releases_dir.resolve())
    if not is_inside and not (folder / RELEASE_FILE).exists():
        return manifest_of_folder(folder, pipeline)
    try:
        release = release_store.load_release(folder)
    except ReleaseError as error:
        advice = (
            f"without a valid {RELEASE_FILE}, the release cannot be checked; run "
            "`pipeline releases repair`"
        )
        raise ReleaseError(*error.reasons, advice) from None
    verify = verify_layout if engine.checks_digests else verify_release
    reasons = list(verify(folder, release))
    if folder.parent == releases_dir and folder.name != release.id:
        reasons.append(f"{RELEASE_FILE}: its id is {release.id}, but its folder is {folder.name}")
    dtype = engine.dtype_of(release)
    if release.probe is not None and dtype not in release.probe.bounds:
        reasons.append(
            f"{RELEASE_FILE}: its probe has no bound for {dtype}, the dtype of this server; it "
            f"has bounds only for {', '.join(release.probe.bounds) or 'nothing'}"
        )
    if reasons:
        raise ReleaseError(*reasons)
    return release


def _converted(release: Release, folder: Path, releases_dir: Path) -> tuple[Release, Path]:
    """The manifest with which a copy of `folder` is served, and the folder of the copy.

    `release` is the manifest of `folder`. Its id contains a digest of all files, so the id says
    whether a copy is up to date. The copy is served under the same id. A copy that was damaged is
    made again. Raises ReleaseError and OSError.
    """
    copies = releases_dir / release_store.CONVERTED
    copies.mkdir(parents=True, exist_ok=True)
    target = copies / release.id
    with release_store.release_lock(copies):  # another server may make the same copy
        found = release_store.list_releases(target)
        whole = [copy for copy in found if not verify_release(target / copy.id, copy)]
        if not whole:
            for each in copies.iterdir():
                is_kept = each != target and (releases_dir / each.name).is_dir()
                if each.is_dir() and not is_kept:
                    shutil.rmtree(each)
            logger.info("%s has .bin shards; they are converted once, into %s", folder, target)
            # The engine compares the tensors with the network when it loads them. An engine may
            # know networks that `check_network` does not know.
            whole = [publish_folder(target, folder, checks_network=False)]
    copy = whole[-1]
    update = {"files": copy.files, "tensors": copy.tensors, "tied": copy.tied}
    return release.model_copy(update=update), target / copy.id
