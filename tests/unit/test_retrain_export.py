"""A trained network is stored under the names under which it was read."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from pipeline.retrain.evaluate import Evaluation
from pipeline.retrain.export import export
from serving.weights.release import Lineage, Probe, Release
from tests.hub_checkpoints import CONFIGS, config_of, save, store
from tests.torch_engine_fixtures import build


def exported(network: Any, home: Path) -> Release:
    return export(
        network,
        torch.float32,
        pipeline_dir=home / "releases",
        files_dir=home / "checkpoint",
        lineage=Lineage(),
        evaluation=Evaluation.model_construct(),
        probe=Probe(dtype="float32", texts=(), bounds={"float32": 1e-3}),
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_a_network_of_the_hub_keeps_its_names(name: str, tmp_path: Path) -> None:
    store(name, tmp_path / "checkpoint")
    network = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint", dtype=torch.float32)
    release = exported(network, tmp_path)
    stored = load_file(tmp_path / "checkpoint" / "model.safetensors")
    buffers = (".attn.bias", ".attention.bias", ".masked_bias", ".inv_freq")
    # The Hub has GPT-2 with this prefix, as `transformers` writes it, and without.
    names, wanted = (
        {each.removeprefix("transformer.") for each in found if not each.endswith(buffers)}
        for found in (release.tensors, stored)
    )
    assert names == wanted
    again = AutoModelForCausalLM.from_pretrained(
        tmp_path / "releases" / release.id, dtype=torch.float32
    )
    for tensor, value in network.state_dict().items():
        assert torch.equal(again.state_dict()[tensor], value), tensor


def test_the_embedding_of_a_tied_network_is_stored_and_not_its_second_name(tmp_path: Path) -> None:
    config = config_of("mixtral")
    config.tie_word_embeddings = True
    network: Any = build(config)
    save(network, tmp_path / "checkpoint")
    release = exported(network, tmp_path)
    assert release.tied == {"lm_head.weight": "model.embed_tokens.weight"}
    assert "model.embed_tokens.weight" in release.tensors
