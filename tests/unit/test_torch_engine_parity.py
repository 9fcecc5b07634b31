"""The torch engine computes what `transformers` computes."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    GPT2Config,
    GPTNeoXConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from serving.engines.torch_engine.staging import llama_shape, read_config
from serving.weights.publish import publish_folder
from tests.torch_engine_fixtures import (
    VOCAB,
    Published,
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

SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

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
OTHERS = {
    "gpt2": GPT2Config(
        vocab_size=VOCAB,
        n_embd=64,
        n_layer=2,
        n_head=4,
        n_positions=128,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
    ),
    "neox": GPTNeoXConfig(
        **{key: value for key, value in SHAPE.items() if key != "num_key_value_heads"}
    ),
    "dynamic rope": llama_config(
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    ),
    "mistral with a window": MistralConfig(**SHAPE, sliding_window=16),
}


@pytest.mark.parametrize("name", [*LLAMA_LIKE, *OTHERS])
def test_greedy_tokens_of_mixed_lengths_equal_those_of_transformers(
    name: str, tmp_path: Path
) -> None:
    config: PreTrainedConfig = {**LLAMA_LIKE, **OTHERS}[name]
    published = publish(build(config), tmp_path)
    assert (llama_shape(read_config(published.folder)) is not None) == (name in LLAMA_LIKE)
    prompts = [prompt(length, seed=length) for length in (1, 3, 17, 40)]

    async def scenario() -> list[list[int]]:
        async with engine_with(published) as engine:
            return await ask_all(engine, published.id, map(greedy, prompts))

    assert asyncio.run(scenario()) == [expected(published.network, one) for one in prompts]


@pytest.mark.parametrize("chunk", [1, 7, 16, 33])
def test_a_prompt_read_in_chunks_gives_the_same_tokens(chunk: int, tmp_path: Path) -> None:
    published = publish(build(llama_config()), tmp_path)
    asked = prompt(90, seed=4)

    async def scenario() -> list[int]:
        async with engine_with(published, max_batch_tokens=chunk) as engine:
            return tokens(await ask(engine, published.id, greedy(asked)))

    assert asyncio.run(scenario()) == expected(published.network, asked)


@pytest.mark.parametrize("config", [llama_config(tie_word_embeddings=True), OTHERS["gpt2"]])
@pytest.mark.parametrize("chunk", [5, 512])
def test_logprobs_equal_those_of_transformers(config: Any, chunk: int, tmp_path: Path) -> None:
    published = publish(build(config), tmp_path)
    asked = prompt(21, seed=9)

    async def scenario() -> Any:
        async with engine_with(published, max_batch_tokens=chunk) as engine:
            return await ask(
                engine,
                published.id,
                greedy(asked, max_tokens=6, num_logprobs=3, num_prompt_logprobs=2),
            )

    steps = asyncio.run(scenario())
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


def test_plain_matrices_serve_where_there_is_no_packing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    published = publish(build(LLAMA_LIKE["biases"]), tmp_path)

    async def scenario() -> list[int]:
        async with engine_with(published) as engine:
            return tokens(await ask(engine, published.id, greedy(prompt(20))))

    assert asyncio.run(scenario()) == expected(published.network, prompt(20))


def test_half_precision_stays_near(tmp_path: Path) -> None:
    published = publish(build(llama_config(initializer_range=0.05)), tmp_path)
    asked = greedy(prompt(40), max_tokens=0, num_prompt_logprobs=0)

    async def scenario() -> Any:
        async with engine_with(published, dtype="bfloat16", max_batch_tokens=9) as engine:
            return (await ask(engine, published.id, asked))[0].prompt_logprobs

    found = [one.logprob for one in asyncio.run(scenario())]
    with torch.inference_mode():
        whole = torch.tensor([asked.prompt])
        reference = published.network(whole).logits[0].log_softmax(-1)
    wanted = reference[range(39), asked.prompt[1:]].tolist()
    assert found == pytest.approx(wanted, abs=0.05)
    assert found != pytest.approx(wanted, abs=1e-5)


def test_scoring_generates_nothing(tmp_path: Path) -> None:
    published = publish(build(llama_config()), tmp_path)

    async def scenario() -> Any:
        async with engine_with(published) as engine:
            ask_for = greedy(prompt(128), max_tokens=0, num_prompt_logprobs=0)
            whole_context = await ask(engine, published.id, ask_for)
            one_token = greedy(prompt(1), max_tokens=0, num_prompt_logprobs=0)
            return whole_context, await ask(engine, published.id, one_token)

    (whole,), (single,) = asyncio.run(scenario())
    assert (whole.token_ids, whole.finish_reason) == ((), "length")
    assert len(whole.prompt_logprobs) == 127
    assert single.prompt_logprobs == ()


def test_the_context_is_the_limit(tmp_path: Path) -> None:
    published = publish(build(llama_config()), tmp_path)

    async def scenario() -> Any:
        async with engine_with(published) as engine:
            near = await ask(engine, published.id, greedy(prompt(125), max_tokens=50))
            at = await ask(engine, published.id, greedy(prompt(128), max_tokens=50))
            return near, at

    near, at = asyncio.run(scenario())
    assert tokens(near) == expected(published.network, prompt(125), 3)
    assert near[-1].finish_reason == "length"
    assert (tokens(at), at[-1].finish_reason) == ([], "length")


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


def test_a_config_that_says_little_has_the_defaults_of_its_architecture(tmp_path: Path) -> None:
    network: Any = build(Qwen3Config(**SHAPE))
    assert network.config.head_dim == 128, "and not 64 / 4, as in a Llama"
    source = tmp_path / "checkpoint"
    network.save_pretrained(source)
    config = json.loads((source / "config.json").read_text())
    del config["head_dim"]
    (source / "config.json").write_text(json.dumps(config))
    release = publish_folder(tmp_path / "releases", source)
    published = Published(
        network=network, release=release, folder=tmp_path / "releases" / release.id
    )
    assert llama_shape(read_config(published.folder)) is None, "`transformers` knows the defaults"

    async def scenario() -> list[int]:
        async with engine_with(published) as engine:
            return tokens(await ask(engine, published.id, greedy(prompt(9))))

    assert asyncio.run(scenario()) == expected(network, prompt(9))


@pytest.mark.parametrize("architecture", ["MistralForCausalLM", "Qwen3ForCausalLM"])
def test_a_default_that_differs_from_llamas_is_not_guessed(architecture: str) -> None:
    said = {**SHAPE, "rms_norm_eps": 1e-6, "architectures": [architecture]}
    assert llama_shape(said) is None
    assert llama_shape({**said, "sliding_window": None, "head_dim": 16}) is not None
