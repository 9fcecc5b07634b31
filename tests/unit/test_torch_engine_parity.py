"""The torch engine computes what `transformers` computes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import MistralConfig, Qwen2Config, Qwen3Config

from serving.engines.torch_engine import llama
from serving.engines.torch_engine.llama import Linear
from serving.engines.torch_engine.staging import llama_shape, read_config
from tests.hub_checkpoints import config_of
from tests.torch_engine_fixtures import (
    SHAPE,
    ask,
    ask_all,
    build,
    engine_with,
    expected,
    greedy,
    llama_config,
    prompt,
    publish,
    tokens,
)

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

DYNAMIC_ROPE = llama_config(
    rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
)
"""Only `transformers` computes it."""
LLAMA_LIKE = {
    "grouped": llama_config(),
    "tied": llama_config(tie_word_embeddings=True),
    "one head each": llama_config(num_key_value_heads=4),
    "biases": llama_config(attention_bias=True, mlp_bias=True),
    "wide heads": llama_config(head_dim=32),
    "linear rope": llama_config(
        rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    ),
    "llama3 rope": llama_config(rope_parameters=LLAMA3),
    "mistral": MistralConfig(**SHAPE, sliding_window=None),
    "qwen2": Qwen2Config(**SHAPE),
    "qwen3": Qwen3Config(**SHAPE, head_dim=32),
}


@pytest.mark.parametrize("name", [*LLAMA_LIKE, "dynamic rope"])
async def test_greedy_tokens_of_mixed_lengths_equal_those_of_transformers(
    name: str, tmp_path: Path
) -> None:
    published = publish(build({**LLAMA_LIKE, "dynamic rope": DYNAMIC_ROPE}[name]), tmp_path)
    assert (llama_shape(read_config(published.folder)) is not None) == (name in LLAMA_LIKE)
    prompts = [prompt(length, seed=length) for length in (1, 3, 17, 40)]
    async with engine_with(published) as engine:
        found = await ask_all(engine, published.id, map(greedy, prompts))
    assert found == [expected(published.network, one) for one in prompts]


@pytest.mark.parametrize("config", [llama_config(tie_word_embeddings=True), config_of("gpt2")])
@pytest.mark.parametrize("chunk", [5, 512])
async def test_logprobs_equal_those_of_transformers(
    config: Any, chunk: int, tmp_path: Path
) -> None:
    published = publish(build(config), tmp_path)
    asked = prompt(21, seed=9)
    async with engine_with(published, max_batch_tokens=chunk) as engine:
        steps = await ask(
            engine,
            published.id,
            greedy(asked, max_tokens=6, num_logprobs=3, num_prompt_logprobs=2, max_step_tokens=3),
        )
    whole = torch.tensor([[*asked, *tokens(steps)]])
    with torch.inference_mode():
        reference = published.network(whole).logits[0].log_softmax(-1)
    of_prompt = steps[0].prompt_logprobs
    assert all(step.prompt_logprobs is None for step in steps[1:])
    assert [one.token_id for one in of_prompt] == list(asked[1:])
    of_output = [logprob for step in steps for logprob in step.logprobs]
    for position, one in enumerate([*of_prompt, *of_output]):
        row = reference[position]
        assert one.logprob == pytest.approx(row[one.token_id].item(), abs=1e-4)
        count = 2 if position < len(of_prompt) else 3
        best = row.topk(count)
        assert [id for id, _ in one.top] == best.indices.tolist()
        assert [value for _, value in one.top] == pytest.approx(best.values.tolist(), abs=1e-4)


async def test_half_precision_stays_near(tmp_path: Path) -> None:
    published = publish(build(llama_config(initializer_range=0.05)), tmp_path)
    asked = greedy(prompt(40), max_tokens=0, num_prompt_logprobs=0)
    async with engine_with(published, dtype="bfloat16", max_batch_tokens=9) as engine:
        steps = await ask(engine, published.id, asked)
    found = [one.logprob for one in steps[0].prompt_logprobs or ()]
    with torch.inference_mode():
        whole = torch.tensor([asked.prompt])
        reference = published.network(whole).logits[0].log_softmax(-1)
    wanted = reference[range(39), asked.prompt[1:]].tolist()
    assert found == pytest.approx(wanted, abs=0.05)
    assert found != pytest.approx(wanted, abs=1e-5)


def test_older_spelling_of_rope_is_read() -> None:
    old = {
        **llama_config().to_dict(),
        "architectures": ["LlamaForCausalLM"],
        "rope_theta": 5000.0,
        "rope_scaling": {"type": "linear", "factor": 4.0},
    }
    del old["rope_parameters"]
    shape = llama_shape(old)
    assert shape is not None
    assert shape.rope["rope_type"] == "linear"
    assert (shape.rope["rope_theta"], shape.rope["factor"]) == (5000.0, 4.0)


@pytest.mark.parametrize("architecture", ["MistralForCausalLM", "Qwen3ForCausalLM"])
def test_a_default_that_differs_from_llamas_is_not_guessed(architecture: str) -> None:
    said = {**SHAPE, "rms_norm_eps": 1e-6, "architectures": [architecture]}
    assert llama_shape(said) is None
    assert llama_shape({**said, "sliding_window": None, "head_dim": 16}) is not None


@pytest.mark.parametrize("fault", [AttributeError("no such operator"), TypeError("2 arguments")])
async def test_a_torch_without_the_packed_product_multiplies_with_the_plain_layout(
    fault: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    def fail(*arguments: object) -> Tensor:
        raise fault

    published = publish(build(LLAMA_LIKE["biases"]), tmp_path)
    llama._can_pack.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(torch.ops.mkldnn, "_linear_pointwise", fail)
        async with engine_with(published) as engine:
            found = tokens(await ask(engine, published.id, greedy(prompt(20))))
    llama._can_pack.cache_clear()
    assert found == expected(published.network, prompt(20))
    assert f"does not multiply packed torch.float32 matrices ({fault})" in caplog.text
    assert Linear(torch.randn(8, 16), None).is_packed
