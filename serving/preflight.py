"""The preflight of a swap: checks on disk whether a folder may be served.

No engine reads `.bin` shards, because they are pickles. But a checkpoint folder may have such
shards, and also a release that an earlier version of hotpush has published. The server then makes a
copy with safetensors shards (`converted.py`), and the engine reads this copy.
"""

from pathlib import Path

from serving.converted import ConvertedCopies
from serving.engine import Engine
from serving.errors import ReleaseError
from serving.weights import release_store
from serving.weights.checkpoint_folder import manifest_of_folder
from serving.weights.index import has_bin
from serving.weights.release import RELEASE_FILE, Release
from serving.weights.verify import verify_layout, verify_release


def read_folder(
    folder: Path, engine: Engine, copies: ConvertedCopies, releases_dir: Path, pipeline: str
) -> tuple[Release, Path]:
    """Checks a release or a checkpoint folder. Returns its manifest, and the folder that the engine
    must read: `folder`, or a copy of it with safetensors shards.

    Raises ReleaseError if `folder` has faults or cannot be converted, and OSError.
    """
    release = _checked(folder, engine, releases_dir, pipeline)
    if has_bin(release.files):
        return copies.copy_of(folder, release)
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
