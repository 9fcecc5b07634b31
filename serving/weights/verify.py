"""Checks a release on disk against its manifest, and collects everything that is wrong."""

import json
from pathlib import Path
from typing import Any

from serving.errors import ReleaseError
from serving.weights.checkpoint_folder import files_digest
from serving.weights.digests import tensor_digest
from serving.weights.headers import DTYPE_BYTES, digest_file, mapped_shard, read_header
from serving.weights.index import INDEX_FILES, is_shard_name, read_index
from serving.weights.release import RELEASE_FILE, Release
from serving.weights.releases import load_release

# Tensors that a reason lists of a file that is gone.
_NAMED = 4
# Of a tensor's digest: the algorithm, and 12 hex.
_SHOWN = len("sha256:") + 12


def verify_release(folder: Path, release: Release | None = None) -> tuple[str, ...]:
    """Every reason not to serve `folder`; empty when it is what its manifest says.

    `verify_layout`, and then the sha256 of every shard. Reads each byte once; loads no tensor.
    """
    try:
        release = release or load_release(folder)
    except ReleaseError as error:
        return error.reasons
    return verify_layout(folder, release) or verify_shards(folder, release)


def verify_layout(folder: Path, release: Release) -> tuple[str, ...]:
    """What can be told without the tensors: sizes of all files, sha256 of all that are no
    safetensors, the index against the manifest and against the shards' own headers, shapes against
    the config.

    Enough before an engine that proves what it reads of a shard, tensor by tensor. A `.bin` shard
    is hashed here, since it has to be unpickled to be read at all.
    """
    reasons = [*_check_id(release), *_check_files(folder, release)]
    if not reasons:
        reasons = [*_check_index(folder, release), *_check_headers(folder, release)]
    if not reasons:
        reasons = _check_config(folder, release)
    return tuple(reasons)


def verify_shards(folder: Path, release: Release) -> tuple[str, ...]:
    """sha256 of every safetensors file, once its layout holds; which tensors are at fault."""
    reasons: list[str] = []
    for shard, entry in sorted(release.files.items()):
        if not shard.endswith(".safetensors"):
            continue
        expected, found = entry.sha256, digest_file(folder / shard).sha256
        if found != expected:
            reasons += _other_tensors(folder, release, shard) or [
                f"{shard}: sha256 is {found[:12]}…, not {expected[:12]}…, though its tensors are "
                "right"
            ]
    return tuple(reasons)


def _other_tensors(folder: Path, release: Release, shard: str) -> list[str]:
    expected = {name: each for name, each in release.tensors.items() if each.file == shard}
    if not expected:
        return []
    header = read_header(folder / shard)
    with mapped_shard(folder / shard, header) as (_, contents):
        found = {
            name: tensor_digest(contents[name], like=entry.digest)
            for name, entry in expected.items()
        }
    return [
        wrong_digest(shard, name, found=found[name], expected=entry.digest)
        for name, entry in expected.items()
        if found[name] != entry.digest
    ]


def wrong_digest(file: str, name: str, *, found: str, expected: str) -> str:
    return f"{file}: tensor {name}: digest is {found[:_SHOWN]}…, not {expected[:_SHOWN]}…"


def _check_id(release: Release) -> list[str]:
    digest = files_digest(release.files)
    if release.id.split("-")[1] != digest:
        return [f"{RELEASE_FILE}: its files hash to {digest}, but its id is {release.id}"]
    return []


def _check_files(folder: Path, release: Release) -> list[str]:
    reasons = []
    for name, entry in sorted(release.files.items()):
        path = folder / name
        if name in ("", ".", "..") or Path(name).name != name:
            reasons.append(f"{RELEASE_FILE}: {name!r} is not a plain file name")
        elif not path.is_file():
            reasons.append(f"{name}: missing{_holding(release, name)}")
        elif (size := path.stat().st_size) != entry.size:
            how = "truncated" if size < entry.size else "too long"
            reasons.append(
                f"{name}: {how}, {size} bytes instead of {entry.size}{_holding(release, name)}"
            )
        elif not name.endswith(".safetensors") and (
            (found := digest_file(path).sha256) != entry.sha256
        ):
            reasons.append(
                f"{name}: sha256 is {found[:12]}…, not {entry.sha256[:12]}…"
                f"{_holding(release, name)}"
            )
    reasons += [
        f"{RELEASE_FILE}: tensor {name}: {entry.file!r} is not one of its files"
        for name, entry in sorted(release.tensors.items())
        if entry.file not in release.files or not is_shard_name(entry.file)
    ]
    if "config.json" not in release.files:
        reasons.append("config.json: missing")
    return reasons


def _holding(release: Release, file: str) -> str:
    """Which tensors that is about; nothing for a file that holds none."""
    names = [name for name, entry in release.tensors.items() if entry.file == file]
    if not names:
        return ""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"; it holds tensor {', '.join(names[:_NAMED])}{more}"


def _check_index(folder: Path, release: Release) -> list[str]:
    if not any(name in release.files for name in INDEX_FILES.values()):
        # A single-shard checkpoint that is served as it is.
        if len({entry.file for entry in release.tensors.values()}) == 1:
            return []
        return [f"{INDEX_FILES['safetensors']}: missing"]
    try:
        index = read_index(folder)
    except ReleaseError as error:
        return list(error.reasons)
    assert index is not None
    name = INDEX_FILES[index.format]
    reasons = [
        f"{name}: tensor {tensor}: in the index, not in {RELEASE_FILE}"
        for tensor in sorted(index.weight_map.keys() - release.tensors.keys())
    ]
    for tensor, entry in sorted(release.tensors.items()):
        shard = index.weight_map.get(tensor)
        if shard is None:
            reasons.append(f"{name}: tensor {tensor}: missing from the index")
        elif shard != entry.file:
            reasons.append(f"{name}: tensor {tensor}: in {shard}, not in {entry.file}")
    return reasons


def _check_headers(folder: Path, release: Release) -> list[str]:
    reasons: list[str] = []
    for shard in sorted({entry.file for entry in release.tensors.values()}):
        if not shard.endswith(".safetensors"):
            continue  # opened by torch alone; the sha256 of the file has vouched for it
        try:
            header = read_header(folder / shard)
        except ReleaseError as error:
            reasons += error.reasons
            continue
        expected = {name: each for name, each in release.tensors.items() if each.file == shard}
        for name in sorted(expected.keys() - header.keys()):
            reasons.append(f"{shard}: tensor {name}: missing from the shard")
        for name in sorted(header.keys() - expected.keys()):
            reasons.append(f"{shard}: tensor {name}: surplus, not in {RELEASE_FILE}")
        for name in sorted(expected.keys() & header.keys()):
            found, listed = header[name], expected[name]
            if (found.dtype, found.shape) != (listed.dtype, listed.shape):
                reasons.append(
                    f"{shard}: tensor {name}: {found.dtype} {list(found.shape)} instead of "
                    f"{listed.dtype} {list(listed.shape)}"
                )
    return reasons


def _check_config(folder: Path, release: Release) -> list[str]:
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except ValueError as error:
        return [f"config.json: not valid JSON: {error}"]
    if not isinstance(config, dict):
        return ["config.json: not an object"]
    reasons = []
    for name, entry in sorted(release.tensors.items()):
        if entry.dtype not in DTYPE_BYTES:
            reasons.append(f"{entry.file}: tensor {name}: dtype {entry.dtype} is not known")
    for name, shape in _shapes_by_config(config).items():
        found = release.tensors.get(name)
        if found is None:
            if name not in release.tied:
                reasons.append(f"{RELEASE_FILE}: tensor {name}: missing, config.json asks for it")
        elif found.shape != shape:
            reasons.append(
                f"{found.file}: tensor {name}: shape {list(found.shape)}, "
                f"but config.json asks for {list(shape)}"
            )
    head = release.tensors.get("lm_head.weight")
    embedding = release.tensors.get("model.embed_tokens.weight")
    if (
        config.get("tie_word_embeddings")
        and head is not None
        and embedding is not None
        and head.digest != embedding.digest
    ):
        reasons.append(
            f"{head.file}: tensor lm_head.weight: differs from model.embed_tokens.weight, "
            "though config.json ties them"
        )
    return reasons


def _shapes_by_config(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of a Llama; what other architectures need, an engine checks while it stages.

    Quantised weights have names and shapes of their own, which the engine that takes them knows.
    """
    if config.get("quantization_config") is not None:
        return {}
    sizes = {
        key: config.get(key)
        for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    }
    if config.get("model_type") != "llama" or not all(
        isinstance(size, int) for size in sizes.values()
    ):
        return {}
    vocab, hidden = int(config["vocab_size"]), int(config["hidden_size"])
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "lm_head.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    inner = int(config["intermediate_size"])
    heads = int(config.get("num_attention_heads", 0) or 0)
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_dim = int(config.get("head_dim") or (hidden // heads if heads else 0))
    for layer in range(int(config["num_hidden_layers"])):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
            f"{prefix}.self_attn.q_proj.weight": (heads * head_dim, hidden),
            f"{prefix}.self_attn.k_proj.weight": (kv_heads * head_dim, hidden),
            f"{prefix}.self_attn.v_proj.weight": (kv_heads * head_dim, hidden),
            f"{prefix}.self_attn.o_proj.weight": (hidden, heads * head_dim),
            f"{prefix}.mlp.gate_proj.weight": (inner, hidden),
            f"{prefix}.mlp.up_proj.weight": (inner, hidden),
            f"{prefix}.mlp.down_proj.weight": (hidden, inner),
        }
    return shapes
