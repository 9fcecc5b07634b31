"""A network whose names in memory are not those of the Hub becomes a release with the Hub's names,
which every reader of checkpoints knows."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from pipeline.retrain.base_model import train_tokenizer
from pipeline.retrain.rows import Row
from serving.engine import Generation
from serving.weights.release_store import load_release, set_current
from tests.hub_checkpoints import config_of, save
from tests.retrain_fixtures import SMALL, Pipeline, facts, few_anchors, jsonl
from tests.torch_engine_fixtures import Published, ask, build, engine_with

TOKENS = tuple(range(3, 40, 3))


def checkpoint(name: str, folder: Path) -> dict[str, tuple[int, ...]]:
    """Write one as the Hub stores it, with a tokenizer; its tensors with their shapes."""
    texts = [Row(text=fact["prompt"] + fact["completion"], file="a", number=0) for fact in facts()]
    tokenizer = train_tokenizer(texts)
    config = config_of(name)
    config.vocab_size, config.eos_token_id = len(tokenizer), tokenizer.eos_token_id
    network: Any = build(config)
    save(network, folder)
    tokenizer.save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    buffers = (".attention.bias", ".masked_bias", ".inv_freq")
    return {name: tuple(each.shape) for name, each in stored.items() if not name.endswith(buffers)}


@torch.inference_mode()
def logprobs_by_transformers(folder: Path) -> list[float]:
    network, report = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    rows = network(torch.tensor([TOKENS])).logits[0].log_softmax(-1)
    found: list[float] = rows[:-1].gather(1, torch.tensor(TOKENS[1:])[:, None])[:, 0].tolist()
    return found


def logprobs_by_the_server(published: Published) -> list[float]:
    scored = Generation(prompt=TOKENS, max_tokens=0, num_prompt_logprobs=0)

    async def scenario() -> list[float]:
        async with engine_with(published) as engine:
            (step,) = await ask(engine, published.id, scored)
            return [each.logprob for each in step.prompt_logprobs or ()]

    return asyncio.run(scenario())


@pytest.mark.parametrize("name", ["gpt_neox", "mixtral"])
def test_a_release_has_the_names_of_its_base_model(name: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    stored = checkpoint(name, tmp_path / name)
    told = SMALL | {"max_tokens": 4_000, "lora_rank": 0, "anchors": few_anchors(tmp_path)}
    gate = {"min_learned": 0.0, "max_base_drift": 1.0}
    pipeline = Pipeline(tmp_path / "home", base_model=str(tmp_path / name), train=told, gate=gate)
    # The second release goes on from the first one.
    for number in (6, 7):
        outcome = pipeline.learn({"a.jsonl": jsonl(facts(num_places=number))})
        assert outcome.result == "published", outcome.reason
        set_current(pipeline.dir, str(outcome.release))
        folder = pipeline.dir / str(outcome.release)
        release = load_release(folder)
        assert {name: each.shape for name, each in release.tensors.items()} == stored
        found = logprobs_by_the_server(Published(network=None, release=release, folder=folder))
        assert found == pytest.approx(logprobs_by_transformers(folder), abs=1e-3)
