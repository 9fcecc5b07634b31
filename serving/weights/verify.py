"""Checks a release on disk against its manifest. The checks run in groups. If a group finds faults,
all its faults are reported, and the later groups do not run."""

from pathlib import Path

from serving.errors import ReleaseError, is_temporary
from serving.weights import network
from serving.weights.release import (
    INDEX_FILE,
    RELEASE_FILE,
    FileEntry,
    Release,
    digest_file,
    files_digest,
    read_header,
    read_json,
)
from serving.weights.release_store import load_release

# A fault report shows this much of a digest: the name of the algorithm and 12 hex digits.
_DIGEST_CHARS = len("sha256:") + 12

TIED = "lm_head.weight", "model.embed_tokens.weight"
"""The names of a head and of the embedding to which a config may tie it."""


def verify_release(folder: Path) -> tuple[str, ...]:
    """The reasons not to serve the release in `folder`; empty if the folder matches its manifest.

    Runs `verify_layout` and, if it finds no fault, `verify_shards`. If the release is undamaged,
    the two functions together read each shard in full only once (and the header of a safetensors
    shard once more). They load no tensor into torch. Raises OSError for a temporary error, such as
    too many open files.
    """
    try:
        release = load_release(folder)
        return verify_layout(folder, release) or verify_shards(folder, release)
    except ReleaseError as error:
        return error.reasons
    except OSError as error:
        if is_temporary(error):
            raise
        # For example, a part of the disk is damaged.
        return (f"{error.filename or folder}: cannot be read: {error.strerror or error}",)


def verify_layout(folder: Path, release: Release) -> tuple[str, ...]:
    """The faults that can be found without reading the tensors of safetensors shards. (A shard is a
    file with a part of the weights.)

    Checks that:

    - the digest in the release's id is right;
    - the manifest lists `config.json`, the index, and the shard of each tensor;
    - every file has the size that the manifest says;
    - every file that is not safetensors has the sha256 that the manifest says;
    - the headers of the shards agree with the manifest;
    - the head is equal to the embedding, if the config ties the two.

    If the id or a file has a fault, the headers are not checked. The head is
    checked only if no other check has found a fault. The shapes of the tensors are not
    compared with the config: `check_network` did so before the release was published, and the
    engine (the part of the server that computes tokens) does so when it loads the release.

    The engines check the digest of each tensor when they read the tensor, so this function is
    enough for a swap. vLLM reads the files itself when it starts, so `verify_shards` runs before.
    """
    reasons = check_files(folder, release)
    if not reasons:
        reasons = _check_headers(folder, release)
    return tuple(reasons or check_tie(folder, release))


def verify_shards(folder: Path, release: Release) -> tuple[str, ...]:
    """The safetensors files whose sha256 is wrong. Call `verify_layout` first."""
    return tuple(
        reason
        for name, entry in sorted(release.files.items())
        if name.endswith(".safetensors")
        for reason in _check_sha256(folder, name, entry)
    )


def _check_sha256(folder: Path, name: str, entry: FileEntry) -> list[str]:
    found = digest_file(folder / name).sha256
    if found == entry.sha256:
        return []
    return [f"{name}: sha256 is {found[:12]}…, not {entry.sha256[:12]}…"]


def wrong_digest(file: str, name: str, *, found: str, expected: str) -> str:
    """The fault report for a tensor whose digest is not the one in the manifest."""
    found, expected = found[:_DIGEST_CHARS], expected[:_DIGEST_CHARS]
    return f"{file}: tensor {name}: digest is {found}…, not {expected}…"


def check_files(folder: Path, release: Release) -> list[str]:
    """The faults that `verify_layout` finds without the headers of shards: in the id, in names
    and sizes, and in the files that are not safetensors."""
    reasons = []
    if not release.id.endswith(f"-{(digest := files_digest(release.files))}"):
        reasons.append(f"{RELEASE_FILE}: the id {release.id} should end with {digest}")
    for name, entry in sorted(release.files.items()):
        path = folder / name
        if not path.is_file():
            reasons.append(f"{name}: missing")
        elif (size := path.stat().st_size) != entry.size:
            how = "truncated" if size < entry.size else "too long"
            reasons.append(f"{name}: {how}, {size} bytes instead of {entry.size}")
        elif not name.endswith(".safetensors"):
            reasons += _check_sha256(folder, name, entry)
    reasons += [
        f"{RELEASE_FILE}: tensor {name}: {entry.file!r} is not one of its files"
        for name, entry in sorted(release.tensors.items())
        if entry.file not in release.files
    ]
    needed = (network.CONFIG_FILE, INDEX_FILE)
    return [*reasons, *(f"{name}: missing" for name in needed if name not in release.files)]


def _check_headers(folder: Path, release: Release) -> list[str]:
    reasons: list[str] = []
    for shard in sorted({entry.file for entry in release.tensors.values()}):
        try:
            header = read_header(folder / shard)
        except ReleaseError as error:
            reasons += error.reasons
            continue
        found = {name: f"{each.dtype} {list(each.shape)}" for name, each in header.items()}
        expected = {
            name: f"{each.dtype} {list(each.shape)}"
            for name, each in release.tensors.items()
            if each.file == shard
        }
        reasons += [
            f"{shard}: tensor {name}: {found.get(name, 'missing')}, but "
            f"{expected.get(name, 'missing')} in {RELEASE_FILE}"
            for name in sorted(found.keys() | expected.keys())
            if found.get(name) != expected.get(name)
        ]
    return reasons


def check_network(folder: Path, release: Release) -> tuple[str, ...]:
    """The reasons why no engine could load these tensors into the network that `config.json`
    describes. Call this function before a release is published. The torch engine makes the same
    checks when it loads a release.

    `check_tie` always runs first. If it finds no fault, `transformers` builds the network, and this
    function compares the stored tensors with the network. (The import of `transformers` takes
    seconds.) In two cases, only `check_tie` runs:

    - The config has no `architectures`, so the network is not known.
    - The weights are quantised, so the stored tensors have other names and shapes than the tensors
      of the network.
    """
    config = read_json(folder / network.CONFIG_FILE)
    reasons = check_tie(folder, release)
    is_quantised = config.get("quantization_config") is not None
    if reasons or is_quantised or not config.get("architectures"):
        return reasons
    import torch

    tensors = {
        name: torch.empty(entry.shape, device="meta") for name, entry in release.tensors.items()
    }
    tensors |= {alias: tensors[name] for alias, name in release.tied.items()}
    try:
        network.load_weights(network.build_network(folder, is_empty=True), tensors)
    except ReleaseError as error:
        return error.reasons
    return ()


def check_tie(folder: Path, release: Release) -> tuple[str, ...]:
    """The fault that the config ties the head to the embedding, and the release stores both, and
    they differ. Raises ReleaseError if `config.json` cannot be read."""
    config = read_json(folder / network.CONFIG_FILE)
    stored = [release.tensors[name] for name in TIED if name in release.tensors]
    if not config.get("tie_word_embeddings") or len({entry.digest for entry in stored}) < 2:
        return ()
    return (
        f"{stored[0].file}: tensor lm_head.weight: differs from model.embed_tokens.weight, "
        "although config.json ties the two",
    )
