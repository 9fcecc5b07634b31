"""Stored tensors make up a network, and each that is missing or too many is named."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from serving.errors import ReleaseError
from serving.tokenizer import load_tokenizer
from serving.weights.network import build_network, load_weights
from tests.hub_checkpoints import CONFIGS, store, stored_tensors


def check(name: str, home: Path, change: Any) -> None:
    folder = home / "checkpoint"
    tensors = {
        each: value.to("meta") for each, value in stored_tensors(store(name, folder)).items()
    }
    change(tensors)
    load_weights(build_network(folder, is_empty=True), tensors)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_tensor_of_a_network_is_made_of_the_stored_ones(name: str, tmp_path: Path) -> None:
    network: Any = store(name, tmp_path / "checkpoint")
    built = build_network(tmp_path / "checkpoint")
    load_weights(built, stored_tensors(network))
    wanted = network.state_dict()
    assert built.state_dict().keys() == wanted.keys()
    for tensor, made in built.state_dict().items():
        assert torch.equal(made, wanted[tensor]), tensor


@pytest.mark.parametrize(
    ("name", "missing", "told"),
    [
        ("gpt2", "h.0.attn.c_attn.weight", "transformer.h.0.attn.c_attn.weight: in no shard"),
        ("gpt_neox", "embed_out.weight", "embed_out.weight: in no shard|lm_head.weight: in no"),
        (
            "mixtral",
            "model.layers.1.block_sparse_moe.experts.3.w2.weight",
            "model.layers.1.mlp.experts.down_proj: has shape",
        ),
    ],
)
def test_a_missing_tensor_is_named(name: str, missing: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(ReleaseError, match=rf"tensor {told}"):
        check(name, tmp_path, lambda stored: stored.pop(missing))


def test_a_tensor_that_leads_nowhere_is_named(tmp_path: Path) -> None:
    def add(stored: dict[str, torch.Tensor]) -> None:
        stored["h.0.attn.strange"] = stored["ln_f.weight"]

    with pytest.raises(ReleaseError, match=r"tensor h\.0\.attn\.strange: the network of"):
        check("gpt2", tmp_path, add)


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    def cut(stored: dict[str, torch.Tensor]) -> None:
        name = "gpt_neox.layers.0.mlp.dense_h_to_4h.weight"
        stored[name] = stored[name][:-1]

    with pytest.raises(
        ReleaseError, match=r"shape \[95, 64\], but config.json asks for \[96, 64\]"
    ):
        check("gpt_neox", tmp_path, cut)


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
