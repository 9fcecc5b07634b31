"""Two releases side by side: what is shared, what is read, and what that is checked against."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, Qwen3Config

from serving.engine import EngineError, StageError
from serving.engines.torch_engine.staging import UnitPool
from tests.torch_engine_changes import changed, first, flip, nudge, until
from tests.torch_engine_fixtures import (
    Published,
    ask,
    build,
    engine_with,
    expected,
    greedy,
    llama_config,
    prompt,
    publish,
    tokens,
)

__all__ = ["first"]

GPT2 = GPT2Config(
    vocab_size=211, n_embd=32, n_layer=1, n_head=2, n_positions=64, initializer_range=0.3
)


def test_two_releases_generate_side_by_side_and_each_as_itself(tmp_path: Path) -> None:
    config = llama_config()
    a, b = (publish(build(config, seed), tmp_path / str(seed)) for seed in (1, 2))

    async def scenario() -> Any:
        async with engine_with(a) as engine:
            old = engine.generate(a.id, greedy(prompt(5), max_tokens=60))
            head = tokens([await anext(old)])
            await engine.stage(b.release, b.folder)
            await engine.commit(b.id)
            new = asyncio.create_task(ask(engine, b.id, greedy(prompt(5), max_tokens=20)))
            await engine.unload(a.id)
            with pytest.raises(EngineError, match="not resident"):
                await ask(engine, a.id, greedy(prompt(5)))
            rest = tokens([step async for step in old])
            await until(lambda: list(engine.residents) == [b.id])
            return head + rest, tokens(await new)

    old, new = asyncio.run(scenario())
    assert old == expected(a.network, prompt(5), 60)
    assert new == expected(b.network, prompt(5), 20)


def test_unchanged_tensors_are_shared_and_not_read(first: Published, tmp_path: Path) -> None:
    layer = "model.layers.1."
    names = (layer + "self_attn.k_proj.weight", layer + "post_attention_layernorm.weight")
    second = changed(first.network, tmp_path / "b", nudge(*names), max_shard_bytes=20_000)

    async def scenario() -> Any:
        async with engine_with(first, second) as engine:
            found = engine.residents
            answers = [
                tokens(await ask(engine, one.id, greedy(prompt(9)))) for one in (first, second)
            ]
            one, other = (engine._steps._schedulers[p.id]._runner for p in (first, second))
            is_shared = [
                one._embedding is other._embedding,
                one._head is other._head,
                one._layers[0].gate_up is other._layers[0].gate_up,
                one._layers[1].down is other._layers[1].down,
                one._layers[1].qkv is other._layers[1].qkv,
            ]
            return found, answers, is_shared

    found, answers, is_shared = asyncio.run(scenario())
    assert is_shared == [True, True, True, True, False]
    assert answers == [expected(one.network, prompt(9)) for one in (first, second)]
    # What is fused with the changed key projection is not read again: it is in memory.
    sizes = {
        name: tensor.nbytes for name, tensor in second.network.state_dict(keep_vars=True).items()
    }
    whole = sum(sizes.values()) - sizes["lm_head.weight"]
    read = sum(sizes[name] for name in names)
    assert found[first.id].read_bytes == whole
    assert found[second.id].read_bytes == read


def test_a_bfloat16_release_shares_its_norms_too(tmp_path: Path) -> None:
    """Norms are held in float32 there, unlike the other tensors."""
    config = Qwen3Config(**llama_config().to_diff_dict() | {"head_dim": 16})
    network = build(config, dtype=torch.bfloat16)
    first = publish(network, tmp_path / "a")
    name = "model.layers.1.mlp.down_proj.weight"
    second = changed(network, tmp_path / "b", nudge(name))

    async def scenario() -> int:
        async with engine_with(first, second, dtype="bfloat16") as engine:
            return engine.residents[second.id].read_bytes

    assert asyncio.run(scenario()) == network.state_dict()[name].nbytes


@pytest.mark.parametrize(
    "config",
    [
        llama_config(),
        llama_config(tie_word_embeddings=True),
        llama_config(attention_bias=True, mlp_bias=True),
        Qwen3Config(**llama_config().to_diff_dict() | {"head_dim": 16}),
    ],
    ids=["llama", "tied", "biases", "head norms"],
)
def test_one_changed_tensor_is_all_that_is_read(config: Any, tmp_path: Path) -> None:
    """Whichever it is, the release then answers as after a cold start."""
    network = build(config)
    first = publish(network, tmp_path / "first")
    names = [
        name for name, _ in network.named_parameters() if "layers.0" in name or "." not in name
    ]
    seconds = [
        changed(network, tmp_path / str(number), nudge(name))
        for number, name in enumerate([*names, "model.embed_tokens.weight", "lm_head.weight"])
        if name in dict(network.named_parameters())
    ]

    async def scenario() -> None:
        async with engine_with(first) as engine:
            for second in seconds:
                new = second.release.tensors
                (name,) = (n for n in new if new[n].digest != first.release.tensors[n].digest)
                await engine.stage(second.release, second.folder)
                await engine.commit(second.id)
                read = engine.residents[second.id].read_bytes
                assert read == second.network.state_dict()[name].nbytes, name
                answer = tokens(await ask(engine, second.id, greedy(prompt(7), 4)))
                assert answer == expected(second.network, prompt(7), 4), name
                await engine.unload(second.id)
                await until(lambda: list(engine.residents) == [first.id])

    asyncio.run(scenario())


def test_bytes_that_are_not_the_manifests_are_refused_if_they_would_be_read(
    first: Published, tmp_path: Path
) -> None:
    changed_name, same = "model.layers.1.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"
    second = changed(first.network, tmp_path / "b", nudge(changed_name))
    file = second.release.tensors[changed_name].file

    async def scenario() -> list[int]:
        async with engine_with(first) as engine:
            flip(second, changed_name)
            with pytest.raises(StageError, match=f"{file}: tensor {changed_name}: digest is"):
                await engine.stage(second.release, second.folder)
            flip(second, changed_name)
            # Nobody serves these: what is in memory is taken.
            flip(second, same)
            await engine.stage(second.release, second.folder)
            await engine.commit(second.id)
            answer = tokens(await ask(engine, second.id, greedy(prompt(5))))
        async with engine_with() as cold:
            with pytest.raises(StageError, match=f"tensor {same}: digest is"):
                await cold.stage(second.release, second.folder)
        return answer

    assert asyncio.run(scenario()) == expected(second.network, prompt(5))


def test_an_other_architecture_shares_its_tensors_too(tmp_path: Path) -> None:
    first = publish(build(GPT2), tmp_path / "a")
    second = changed(first.network, tmp_path / "b", nudge("transformer.h.0.mlp.c_fc.weight"))

    async def scenario() -> Any:
        async with engine_with(first, second) as engine:
            return engine.residents[second.id].read_bytes

    assert asyncio.run(scenario()) == 32 * 128 * 4


def test_units_of_one_part_search_for_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search looks at all units in memory. With many experts it takes seconds."""

    def search(*_: Any) -> None:
        raise AssertionError("no unit of this network consists of parts")

    monkeypatch.setattr(UnitPool, "find_with_part", search)
    published = publish(build(GPT2), tmp_path)

    async def scenario() -> None:
        async with engine_with(published) as engine:
            assert published.id in engine.residents

    asyncio.run(scenario())
