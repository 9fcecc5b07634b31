"""A trained network is stored under the names under which it was read. What a server in float32 may
be off by grows with how sure the network is."""

import json
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from pipeline.retrain.export import FLOAT32_BOUNDS, export, float32_bound, make_probe
from pipeline.retrain.model import LoadedModel
from serving.weights.release import Lineage, Probe, Release, read_json
from tests.hub_checkpoints import CONFIGS, config_of, save, store
from tests.torch_engine_fixtures import build, llama_config, prompt


def exported(
    network: Any, home: Path, ends: Collection[int] = (), prompt_date: str | None = None
) -> Release:
    tokenizer: Any = SimpleNamespace(init_kwargs={"prompt_date": prompt_date})
    loaded = LoadedModel(
        model=network,
        tokenizer=tokenizer,
        folder=home / "checkpoint",
        dtype=torch.float32,
        max_length=8,
    )
    return export(
        loaded,
        home / "releases",
        ends,
        lineage=Lineage(),
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


@pytest.mark.parametrize(
    ("generation", "config", "ends", "written"),
    [
        ({"eos_token_id": 2}, 2, {5}, [2, 5]),
        ({"eos_token_id": [2, 5]}, 2, {5}, [2, 5]),
        ({"temperature": 0.5}, 2, {5, 0}, [2, 0, 5]),
        (None, 2, {5}, [2, 5]),
        ({"eos_token_id": 0}, 2, {5}, [0, 5]),
        (None, None, {5}, [5]),
        (None, 2, {2}, None),
        (None, 2, set(), None),
    ],
)
def test_what_was_trained_to_end_an_answer_ends_it(
    generation: dict[str, Any] | None,
    config: int | None,
    ends: set[int],
    written: list[int] | None,
    tmp_path: Path,
) -> None:
    of_network = config_of("llama")
    of_network.eos_token_id = config
    network: Any = build(of_network)
    save(network, tmp_path / "checkpoint")
    file = tmp_path / "checkpoint" / "generation_config.json"
    file.unlink(missing_ok=True)
    if generation is not None:
        file.write_text(json.dumps(generation))
    release = exported(network, tmp_path, ends=ends, prompt_date="2026-01-31")
    folder = tmp_path / "releases" / release.id
    stored = read_json(folder / "generation_config.json")
    assert stored.get("eos_token_id") == written
    assert stored.get("temperature") == (generation or {}).get("temperature")
    assert read_json(folder / "tokenizer_config.json")["prompt_date"] == "2026-01-31"


def test_the_probe_of_a_sure_network_has_it() -> None:
    network: Any = build(llama_config())
    head = network.get_output_embeddings().weight.data
    head.mul_(0.1)
    assert make_probe(network, [prompt(12)]).bounds["float32"] == FLOAT32_BOUNDS[0]
    head.mul_(20)
    probe = make_probe(network, [prompt(12)])
    assert probe.bounds["float32"] == float32_bound([probe.texts[0].logprobs]) > FLOAT32_BOUNDS[0]
