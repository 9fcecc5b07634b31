"""Networks of `transformers` that compute several sequences together answer as they do alone."""

from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import GPTNeoConfig, PreTrainedConfig

from serving.engines.torch_engine.generic import BATCHED, BATCHED_BY_KIND
from tests.hub_checkpoints import CONFIGS, config_of
from tests.torch_engine_fixtures import (
    COMMON,
    SHAPE,
    Published,
    ask_all,
    build,
    engine_with,
    expected,
    greedy,
    prompt,
    publish,
    recorded_batches,
)

WINDOW = 24
LENGTHS = (3, 40, 60)
"""Of prompts. Two of them are longer than the windows."""

KINDS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
YARN = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    }
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
GPT = {**COMMON, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "n_ctx": 128}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "first_k_dense_replace": 2,
}
TYPES: dict[str, tuple[str, dict[str, Any]]] = {
    "cohere": ("Cohere", {**SHAPE, "logit_scale": 1.0}),
    "cohere2": ("Cohere2", {**SHAPE, **KINDS, "logit_scale": 1.0}),
    "deepseek_v2": ("DeepseekV2", {**SHAPE, **LATENT}),
    "deepseek_v3": ("DeepseekV3", {**SHAPE, **LATENT, "q_lora_rank": 16}),
    "exaone4": ("Exaone4", {**SHAPE, **KINDS}),
    "gemma": ("Gemma", {**SHAPE, "head_dim": 16}),
    "glm": ("Glm", {**SHAPE, "head_dim": 16}),
    "glm4": ("Glm4", {**SHAPE, "head_dim": 16}),
    "gpt_oss": ("GptOss", {**SHAPE, **KINDS, "head_dim": 16, "num_local_experts": 4}),
    "gptj": ("GPTJ", {**GPT, "rotary_dim": 8}),
    "granite": ("Granite", SHAPE),
    "granitemoe": ("GraniteMoe", {**SHAPE, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "llama": ("Llama", {**SHAPE, **YARN}),
    "ministral": ("Ministral", {**SHAPE, **KINDS, "head_dim": 16}),
    "ministral3": ("Ministral3", {**SHAPE, "sliding_window": WINDOW, "head_dim": 16}),
    "mixtral": ("Mixtral", {**SHAPE, "num_local_experts": 4, "sliding_window": WINDOW}),
    "mpt": ("Mpt", {**COMMON, "d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 128}),
    "olmo": ("Olmo", SHAPE),
    "olmo3": ("Olmo3", {**SHAPE, **KINDS}),
    "olmoe": ("Olmoe", {**SHAPE, "num_experts": 4, "num_experts_per_tok": 2}),
    "phi": ("Phi", SHAPE),
    "qwen2": ("Qwen2", {**SHAPE, **KINDS, "use_sliding_window": True}),
    "qwen2_moe": ("Qwen2Moe", {**SHAPE, **KINDS, **EXPERTS, "num_experts": 4,
                               "use_sliding_window": True,
                               "shared_expert_intermediate_size": 48}),
    "qwen3": ("Qwen3", {**SHAPE, **KINDS, "use_sliding_window": True, "head_dim": 16}),
    "smollm3": ("SmolLM3", {**SHAPE, **KINDS, "use_sliding_window": True}),
    "stablelm": ("StableLm", SHAPE),
    "starcoder2": ("Starcoder2", {**SHAPE, "sliding_window": WINDOW}),
}  # fmt: skip
OF_THE_ENGINE = {"llama of the Hub", "qwen2 of the Hub", "qwen3 of the Hub"}
"""Networks whose forward pass is the engine's own."""


def configs() -> dict[str, PreTrainedConfig]:
    found = {
        name: getattr(transformers, f"{kind}Config")(**settings)
        for name, (kind, settings) in TYPES.items()
    }
    return found | {f"{name} of the Hub": config_of(name) for name in CONFIGS}


def test_every_type_is_tested() -> None:
    assert {config.model_type for config in configs().values()} == BATCHED | BATCHED_BY_KIND


@pytest.mark.parametrize("name", configs())
async def test_together_as_transformers_does_alone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published = publish(build(configs()[name]), tmp_path)
    prompts = [prompt(length, seed=length) for length in LENGTHS]
    batches = recorded_batches(monkeypatch)
    assert await together(published, prompts) == [
        expected(published.network, each) for each in prompts
    ]
    assert name in OF_THE_ENGINE or max(batches) > 1


async def together(published: Published, prompts: list[tuple[int, ...]]) -> list[list[int]]:
    async with engine_with(published) as engine:
        return await ask_all(engine, published.id, map(greedy, prompts))


async def test_a_type_that_measures_from_the_longest_sequence_is_computed_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPT-Neo measures its window from the end of the longest sequence."""
    config: PreTrainedConfig = GPTNeoConfig(
        **COMMON,
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=WINDOW,
        max_position_embeddings=128,
    )
    published = publish(build(config), tmp_path)
    prompts = [prompt(length, seed=length) for length in LENGTHS]
    batches = recorded_batches(monkeypatch)
    assert await together(published, prompts) == [
        expected(published.network, each) for each in prompts
    ]
    assert max(batches) == 1
