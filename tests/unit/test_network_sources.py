"""Stored tensors lead to those of a network, and each that is missing or too many is named."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from serving.errors import ReleaseError
from serving.tokenizer import load_tokenizer
from serving.weights.network import Sources, build_network, sources
from serving.weights.release import TensorEntry
from tests.hub_checkpoints import CONFIGS, store, stored_tensors


def entries(tensors: dict[str, torch.Tensor]) -> dict[str, TensorEntry]:
    digest = "blake3:" + "0" * 64
    return {
        name: TensorEntry(file="shard", dtype="F32", shape=tuple(each.shape), digest=digest)
        for name, each in tensors.items()
    }


def find(name: str, folder: Path, change: Any = None) -> Sources:
    stored = entries(stored_tensors(store(name, folder / name)))
    if change is not None:
        change(stored)
    return sources(build_network(folder / name, is_empty=True), stored)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_tensor_of_a_network_is_made_of_the_stored_ones(name: str, tmp_path: Path) -> None:
    network: Any = store(name, tmp_path / name)
    tensors = stored_tensors(network)
    found = sources(build_network(tmp_path / name, is_empty=True), entries(tensors))
    wanted = network.state_dict()
    assert found.by_tensor.keys() == wanted.keys()
    for tensor, source in found.by_tensor.items():
        made = source.convert([tensors[part] for part in source.names])
        assert torch.equal(made, wanted[tensor]), tensor
    read = {part for source in found.by_tensor.values() for part in source.names}
    assert read | found.ignored == tensors.keys()


def test_a_checkpoint_that_was_saved_under_the_networks_own_names_is_read_too(
    tmp_path: Path,
) -> None:
    for name in ("gpt2", "gpt_neox", "mixtral"):
        network: Any = store(name, tmp_path / name)
        stored = entries(network.state_dict())
        found = sources(build_network(tmp_path / name, is_empty=True), stored)
        assert all(source.kind == "plain" for source in found.by_tensor.values())


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("gpt2", "transformer.h.0.attn.c_attn.weight"),
        ("gpt_neox", "embed_out.weight"),
        ("mixtral", "model.layers.1.block_sparse_moe.experts.3.w1.weight"),
        ("qwen3_moe", "model.layers.0.mlp.experts.1.down_proj.weight"),
    ],
)
def test_a_missing_tensor_is_named_as_the_hub_names_it(
    name: str, missing: str, tmp_path: Path
) -> None:
    def lose(stored: dict[str, TensorEntry]) -> None:
        del stored[missing.removeprefix("transformer.") if name == "gpt2" else missing]

    with pytest.raises(ReleaseError, match=rf"tensor {missing}: in no shard"):
        find(name, tmp_path, lose)


def test_an_expert_with_another_number_does_not_fill_a_gap(tmp_path: Path) -> None:
    at = "model.layers.0.block_sparse_moe.experts."

    def renumber(stored: dict[str, TensorEntry]) -> None:
        stored[f"{at}7.w2.weight"] = stored.pop(f"{at}1.w2.weight")

    with pytest.raises(ReleaseError, match=rf"tensor {at}1\.w2\.weight: in no shard"):
        find("mixtral", tmp_path, renumber)


def test_a_tensor_that_leads_nowhere_is_named(tmp_path: Path) -> None:
    def add(stored: dict[str, TensorEntry]) -> None:
        stored["h.0.attn.strange"] = stored["ln_f.weight"]

    with pytest.raises(ReleaseError, match=r"shard: tensor h\.0\.attn\.strange: the network of"):
        find("gpt2", tmp_path, add)


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    def cut(stored: dict[str, TensorEntry]) -> None:
        name = "gpt_neox.layers.0.mlp.dense_h_to_4h.weight"
        stored[name] = stored[name].model_copy(update={"shape": (95, 64)})

    with pytest.raises(
        ReleaseError, match=r"shape \[95, 64\], but config.json asks for \[96, 64\]"
    ):
        find("gpt_neox", tmp_path, cut)


def test_experts_of_different_shapes_cannot_be_put_together(tmp_path: Path) -> None:
    name = "model.layers.0.block_sparse_moe.experts.1.w2.weight"

    def cut(stored: dict[str, TensorEntry]) -> None:
        stored[name] = stored[name].model_copy(update={"shape": (64, 95)})

    with pytest.raises(ReleaseError, match=r"w2\.weight.*cannot be put together"):
        find("mixtral", tmp_path, cut)


def test_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no such thing"}')
    with pytest.raises(ReleaseError, match=r"config\.json: transformers cannot read it"):
        build_network(tmp_path)


def test_a_network_that_generates_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(ReleaseError, match="generates text"):
        build_network(tmp_path)


@pytest.mark.parametrize("model_type", ["llama", "its_own"])
def test_code_in_a_checkpoint_does_not_run(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What a user would say to the question of `transformers` whether it may.
    monkeypatch.setattr("builtins.input", lambda question: "y")
    folder = tmp_path / "checkpoint"
    store("llama", folder)
    marker = tmp_path / "it-ran"
    (folder / "own.py").write_text(f"open({str(marker)!r}, 'w').close()\nclass Own: pass\n")
    path = folder / "config.json"
    own = dict.fromkeys(("AutoConfig", "AutoModelForCausalLM"), "own.Own")
    changes = {"model_type": model_type, "auto_map": own}
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    # `transformers` reads a tokenizer if the file of a tokenizer has no such token.
    settings = {
        "added_tokens_decoder": {"0": "<own>"},
        "auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    for read in (build_network, load_tokenizer):
        with contextlib.suppress(ReleaseError):
            read(folder)
    assert not marker.exists()
