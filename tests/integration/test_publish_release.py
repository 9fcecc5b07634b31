"""Publishing real checkpoints: transformers reads what was published, broken ones are refused."""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from serving.errors import NotEnoughSpace, ReleaseError
from serving.weights.publish import publish_folder, publish_state_dict
from serving.weights.release import Lineage, Release, digest_file, files_digest, read_index
from serving.weights.release_store import load_release
from serving.weights.verify import check_network, verify_release
from tests.serving_fixtures import save_config, tiny_llama


def published(tmp_path: Path, *, tied: bool = True, seed: int = 0) -> tuple[Path, Release]:
    model = tiny_llama(tied=tied, seed=seed)
    release = publish_state_dict(
        tmp_path / "releases" / "answers",
        model.state_dict(),
        files_dir=save_config(model, tmp_path / "files"),
        lineage=Lineage(dataset="me/facts", job_id="j1"),
        max_shard_bytes=8_000,
    )
    return tmp_path / "releases" / "answers" / release.id, release


@pytest.mark.parametrize("tied", [True, False])
def test_transformers_loads_what_was_published(tmp_path: Path, tied: bool) -> None:
    folder, release = published(tmp_path, tied=tied)
    original = tiny_llama(tied=tied)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, original(tokens).logits)
    assert verify_release(folder) == ()
    assert load_release(folder) == release
    index = read_index(folder)
    assert index is not None and len(set(index.weight_map.values())) > 1
    assert index.metadata["total_size"] == sum(
        tensor.nbytes for name, tensor in original.state_dict().items() if name not in release.tied
    )
    assert release.tied == ({"lm_head.weight": "model.embed_tokens.weight"} if tied else {})


@pytest.mark.parametrize("tied", [True, False])
def test_a_save_pretrained_folder_is_published(tmp_path: Path, tied: bool) -> None:
    model = tiny_llama(tied=tied)
    source = tmp_path / "checkpoint"
    model.save_pretrained(source, max_shard_size="8KB")
    (source / "training_args.bin").write_bytes(b"a pickle that nobody asked for")
    (source / "modeling.py").write_text("raise SystemExit")
    release = publish_folder(tmp_path / "releases" / "answers", source)
    folder = tmp_path / "releases" / "answers" / release.id
    assert {path.name for path in folder.iterdir()} == {*release.files, "release.json"}
    assert "training_args.bin" not in release.files and "modeling.py" not in release.files
    assert verify_release(folder) == ()
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.zeros(2, dtype=torch.complex128), "complex128"),
        (torch.zeros(2, device="meta"), "no data"),
    ],
)
def test_a_tensor_that_no_shard_can_store_is_refused(
    tmp_path: Path, tensor: torch.Tensor, reason: str
) -> None:
    model, pipeline_dir = tiny_llama(), tmp_path / "answers"
    state = {**model.state_dict(), "strange": tensor}
    files = save_config(model, tmp_path / "files")
    with pytest.raises(ReleaseError, match=rf"model.safetensors: .* cannot be stored: .*{reason}"):
        publish_state_dict(pipeline_dir, state, files_dir=files)
    assert list(pipeline_dir.glob("r*")) == []


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 16)


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (truncate, "truncated"),
        (Path.unlink, "missing"),
        (flip_a_byte, "sha256 is"),
    ],
)
def test_damage_is_named_with_its_file(tmp_path: Path, damage: object, reason: str) -> None:
    folder, release = published(tmp_path)
    shard = release.tensors["model.norm.weight"].file
    damage(folder / shard)  # type: ignore[operator]
    (found,) = verify_release(folder)
    assert found.startswith(f"{shard}: ") and reason in found


def reseal(folder: Path, **changes: object) -> None:
    """Rewrite the manifest so that only the inconsistency under test is left."""
    release = load_release(folder)
    files = {name: digest_file(folder / name) for name in release.files}
    digest = files_digest(files)
    sealed = release.model_copy(
        update={"files": files, "id": f"{release.id.split('-')[0]}-{digest}", **changes}
    )
    (folder / "release.json").write_text(sealed.model_dump_json())


def test_a_surplus_tensor_in_a_shard_is_refused(tmp_path: Path) -> None:
    folder, release = published(tmp_path, tied=False)
    tensors = dict(release.tensors)
    gone = tensors.pop("model.layers.1.input_layernorm.weight")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    del index["weight_map"]["model.layers.1.input_layernorm.weight"]
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    reseal(folder, tensors=tensors)
    (reason,) = verify_release(folder)
    assert reason.startswith(
        f"{gone.file}: tensor model.layers.1.input_layernorm.weight: F32 [16], but missing in"
    )


def test_shapes_must_fit_the_config_and_ties_must_hold(tmp_path: Path) -> None:
    folder, _ = published(tmp_path, tied=False)
    config = json.loads((folder / "config.json").read_text())
    larger = {**config, "architectures": ["LlamaForCausalLM"], "intermediate_size": 48}
    (folder / "config.json").write_text(json.dumps(larger))
    reasons = check_network(folder, load_release(folder))
    assert sum("mlp" in reason for reason in reasons) == 6
    assert all("but config.json asks for [" in reason for reason in reasons)
    (folder / "config.json").write_text(json.dumps({**larger, "tie_word_embeddings": True}))
    reseal(folder)
    (reason,) = verify_release(folder)
    assert "lm_head.weight" in reason and "ties" in reason
    assert check_network(folder, load_release(folder)) == (reason,)


def test_a_quantised_release_has_names_of_its_own(tmp_path: Path) -> None:
    """They are the engine's to check, which takes them or not."""
    model = tiny_llama(tied=False)
    files = save_config(model, tmp_path / "files")
    config = json.loads((files / "config.json").read_text())
    quantised = {**config, "quantization_config": {"quant_method": "gptq", "bits": 4}}
    (files / "config.json").write_text(json.dumps(quantised))
    packed = {
        name.replace("proj.weight", "proj.qweight"): tensor
        for name, tensor in model.state_dict().items()
    }
    release = publish_state_dict(tmp_path / "releases" / "answers", packed, files_dir=files)
    assert "model.layers.0.mlp.up_proj.qweight" in release.tensors
    assert verify_release(tmp_path / "releases" / "answers" / release.id) == ()


def test_a_manifest_cannot_point_outside_its_folder(tmp_path: Path) -> None:
    folder, release = published(tmp_path)
    shutil.copy(folder / "config.json", tmp_path / "releases" / "answers" / "secret.json")
    files = {**release.files, "../secret.json": release.files["config.json"]}
    (folder / "release.json").write_text(
        release.model_copy(update={"files": files}).model_dump_json()
    )
    assert any("../secret.json" in reason for reason in verify_release(folder))


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        ("../model.safetensors", "'../model.safetensors' is not one of its files"),
        ("config.json", "config.json: truncated or not a safetensors file"),
    ],
)
def test_a_tensor_is_in_a_shard_of_its_release(tmp_path: Path, file: str, reason: str) -> None:
    folder, release = published(tmp_path)
    name, entry = next(iter(release.tensors.items()))
    reseal(folder, tensors={**release.tensors, name: entry.model_copy(update={"file": file})})
    assert any(reason in each for each in verify_release(folder))


def test_too_small_a_disk_is_seen_before_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 10))
    with pytest.raises(NotEnoughSpace, match="10 bytes are free"):
        published(tmp_path)
    assert set(os.listdir(tmp_path / "releases" / "answers")) == {".lock"}


def test_a_disk_that_fills_up_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fsync

    def full(descriptor: int) -> None:
        if os.fstat(descriptor).st_size > 4_000:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(NotEnoughSpace, match="filled up"):
        published(tmp_path)
    assert set(os.listdir(tmp_path / "releases" / "answers")) == {".lock"}


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path: Path, missing: str) -> None:
    source = tmp_path / "checkpoint"
    tiny_llama().save_pretrained(source)
    (source / missing).unlink()
    with pytest.raises(ReleaseError, match=r"config\.json|no weights"):
        publish_folder(tmp_path / "releases" / "answers", source)
