"""`.bin` shards are converted once: when a folder is published, or when a server serves it."""

import os
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from serving.engines.torch_engine.engine import create_engine
from serving.errors import ReleaseError
from serving.weights import shards
from serving.weights.publish import publish_folder
from serving.weights.release import INDEX_FILE, Release
from serving.weights.release_store import list_releases
from serving.weights.verify import verify_release
from tests.bin_fixtures import Trap, bin_folder, network
from tests.serving_fixtures import byte_tokenizer, echo_app, running
from tests.torch_engine_fixtures import clear_prompt, expected

MAX_TOKENS = 8


def publish(tmp_path: Path, source: Path) -> tuple[Path, Release]:
    release = publish_folder(tmp_path / "answers", source)
    return tmp_path / "answers" / release.id, release


@pytest.mark.parametrize(
    ("num_shards", "tied", "dtype"), [(1, True, torch.float32), (3, False, torch.bfloat16)]
)
def test_a_published_folder_has_safetensors_shards(
    tmp_path: Path, num_shards: int, tied: bool, dtype: torch.dtype
) -> None:
    original = network(tied=tied, dtype=dtype)
    source = bin_folder(tmp_path / "checkpoint", original, num_shards=num_shards)
    (source / "training_args.bin").write_bytes(b"a pickle that nobody asked for")
    folder, release = publish(tmp_path, source)
    assert INDEX_FILE in release.files
    assert not any("pytorch_model" in name or name.endswith(".bin") for name in release.files)
    assert {path.name for path in folder.iterdir()} == {*release.files, "release.json"}
    assert verify_release(folder) == ()
    # The embedding is the name that is stored, although the head comes first in the index.
    assert release.tied == ({"lm_head.weight": "model.embed_tokens.weight"} if tied else {})
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).state_dict()
    for name, tensor in original.state_dict().items():
        assert loaded[name].dtype == dtype and torch.equal(loaded[name], tensor)


def test_a_view_of_a_larger_tensor_is_stored_alone(tmp_path: Path) -> None:
    """Tensors that share memory but differ in shape are no tie."""
    source = bin_folder(tmp_path / "checkpoint", network(), num_shards=1)
    (source / "config.json").write_text('{"model_type": "echo"}')
    whole = torch.arange(60_000).float().reshape(200, 300)
    state = {"whole": whole, "turned": whole.T, "part": whole[:1], "tail": whole[150:, 7]}
    torch.save(state, source / "pytorch_model.bin")
    folder, release = publish(tmp_path, source)
    assert release.tensors.keys() == state.keys() and release.tied == {}
    weight_map = {name: entry.file for name, entry in release.tensors.items()}
    for name, tensor in shards.read_tensors(folder, weight_map).items():
        assert torch.equal(tensor, state[name])


def test_shards_from_before_torch_1_6_are_published_too(tmp_path: Path) -> None:
    original = network()
    source = bin_folder(tmp_path / "checkpoint", original, num_shards=1)
    shard, state = source / "pytorch_model.bin", original.state_dict()
    torch.save(state, shard, _use_new_zipfile_serialization=False)
    folder, release = publish(tmp_path, source)
    weight_map = {name: entry.file for name, entry in release.tensors.items()}
    for name, tensor in shards.read_tensors(folder, weight_map).items():
        assert torch.equal(tensor, state[name])


def test_safetensors_are_preferred_to_pickles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a repository of the Hub that has both."""
    model = network()
    source = bin_folder(tmp_path / "checkpoint", model)
    model.save_pretrained(source)
    monkeypatch.setattr(torch, "load", None)
    _, release = publish(tmp_path, source)
    assert release.tensors.keys() == model.state_dict().keys()


@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "before torch 1.6"])
def test_code_in_a_pickle_does_not_run(tmp_path: Path, is_zip: bool) -> None:
    source = bin_folder(tmp_path / "checkpoint", network(), num_shards=2)
    shard = max(source.glob("*.bin"))
    state = {"lm_head.weight": Trap(tmp_path / "trap")}
    torch.save(state, shard, _use_new_zipfile_serialization=is_zip)
    with pytest.raises(ReleaseError, match=rf"{shard.name}: cannot be read"):
        publish(tmp_path, source)
    assert not (tmp_path / "trap").exists()
    assert list_releases(tmp_path / "answers") == []


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def replace_by_text(path: Path) -> None:
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")


def store_a_list(path: Path) -> None:
    torch.save([torch.ones(2)], path)


@pytest.mark.parametrize(
    "damage",
    [truncate, replace_by_text, store_a_list, Path.unlink],
)
def test_a_damaged_shard_is_named(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    source = bin_folder(tmp_path / "checkpoint", network())
    shard = source / "pytorch_model-00002-of-00002.bin"
    damage(shard)
    with pytest.raises(ReleaseError, match=rf"^{shard.name}: "):
        publish(tmp_path, source)
    assert list_releases(tmp_path / "answers") == []


def test_a_folder_is_published_and_then_served(tmp_path: Path) -> None:
    original = network()
    prompt = clear_prompt([original], 5, MAX_TOKENS)
    right = byte_tokenizer().decode(expected(original, prompt, MAX_TOKENS))
    source = bin_folder(tmp_path / "checkpoint", original)
    before = {path: path.stat().st_mtime_ns for path in source.iterdir()}
    pipeline_dir = tmp_path / "releases" / "answers"
    engine = create_engine(num_threads=1, kv_cache_bytes=64 << 20)
    with running(echo_app(pipeline_dir, engine, folder=source)) as url:
        body = {"prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
        found = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
        assert found["choices"][0]["text"] == right
        (release,) = list_releases(pipeline_dir)
        assert found["system_fingerprint"] == release.id
    assert {path: path.stat().st_mtime_ns for path in source.iterdir()} == before
