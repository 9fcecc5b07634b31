"""Staging: what is shared, what is refused, who waits, and that memory goes."""

import asyncio
import gc
import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import GPT2Config, Qwen3Config

from serving.engine import EngineError, StageError
from serving.engines.torch_engine import loading, staging
from serving.engines.torch_engine.engine import TorchEngine, create_engine
from serving.errors import ServingError
from serving.weights.checkpoint_folder import manifest_of_folder
from serving.weights.headers import read_header
from serving.weights.publish import publish_folder
from serving.weights.verify import verify_release
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

Change = Callable[[dict[str, torch.Tensor]], None]


def changed(network: Any, home: Path, change: Change, **options: Any) -> Published:
    other = build(network.config)
    other.load_state_dict(network.state_dict())
    with torch.no_grad():
        change(dict(other.named_parameters()))
    return publish(other, home, **options)


def nudge(*names: str) -> Change:
    def change(parameters: dict[str, torch.Tensor]) -> None:
        for name in names:
            parameters[name].mul_(-1.3)

    return change


@pytest.fixture
def first(tmp_path: Path) -> Published:
    return publish(build(llama_config(tie_word_embeddings=True)), tmp_path)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


def test_two_releases_generate_side_by_side_and_each_as_itself(tmp_path: Path) -> None:
    config = llama_config()
    a, b = (publish(build(config, seed), tmp_path / str(seed)) for seed in (1, 2))

    async def scenario() -> Any:
        async with engine_with(a) as engine:
            old = engine.generate(a.id, greedy(prompt(5), max_tokens=60))
            head = tokens([await anext(old)])
            await engine.stage(b.release, b.folder)
            with pytest.raises(EngineError, match="commit it first"):
                engine.generate(b.id, greedy(prompt(5)))
            await engine.commit(b.id)
            new = asyncio.create_task(ask(engine, b.id, greedy(prompt(5), max_tokens=20)))
            await engine.unload(a.id)
            with pytest.raises(EngineError, match="not live"):
                engine.generate(a.id, greedy(prompt(5)))
            rest = tokens([step async for step in old])
            await until(lambda: list(engine.resident_releases()) == [b.id])
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
            found = engine.resident_releases()
            answers = [
                tokens(await ask(engine, one.id, greedy(prompt(9)))) for one in (first, second)
            ]
            one, other = (engine._steps._lanes[p.id]._runner for p in (first, second))
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
    assert (found[first.id].read_bytes, found[first.id].shared_bytes) == (whole, 0)
    assert found[second.id].read_bytes == read
    assert found[second.id].shared_bytes == whole - read


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
                read = engine.resident_releases()[second.id].read_bytes
                assert read == second.network.state_dict()[name].nbytes, name
                answer = tokens(await ask(engine, second.id, greedy(prompt(7), 4)))
                assert answer == expected(second.network, prompt(7), 4), name
                await engine.unload(second.id)
                await until(lambda: list(engine.resident_releases()) == [first.id])

    asyncio.run(scenario())


def flip(published: Published, name: str) -> None:
    """One bit of a tensor on disk; sizes, header and manifest stay."""
    entry = published.release.tensors[name]
    path = published.folder / entry.file
    content = bytearray(path.read_bytes())
    content[read_header(path)[name].begin] ^= 1
    path.write_bytes(content)


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
    config = GPT2Config(
        vocab_size=211, n_embd=32, n_layer=1, n_head=2, n_positions=64, initializer_range=0.3
    )
    first = publish(build(config), tmp_path / "a")
    second = changed(first.network, tmp_path / "b", nudge("transformer.h.0.mlp.c_fc.weight"))

    async def scenario() -> Any:
        async with engine_with(first, second) as engine:
            return engine.resident_releases()[second.id].read_bytes

    assert asyncio.run(scenario()) == 32 * 128 * 4


def test_bin_shards_are_read(tmp_path: Path) -> None:
    published = publish(build(llama_config()), tmp_path, format="bin", max_shard_bytes=50_000)

    async def scenario() -> list[int]:
        async with engine_with(published) as engine:
            return tokens(await ask(engine, published.id, greedy(prompt(9))))

    assert asyncio.run(scenario()) == expected(published.network, prompt(9))


def edit_config(**changes: Any) -> Callable[[Published], Published]:
    def edit(published: Published) -> Published:
        path = published.folder / "config.json"
        config = {**json.loads(path.read_text()), **changes}
        path.write_text(json.dumps(config))
        return published

    return edit


def edit_manifest(name: str, **changes: Any) -> Callable[[Published], Published]:
    def edit(published: Published) -> Published:
        tensors = dict(published.release.tensors)
        if changes:
            tensors[name] = tensors[name].model_copy(update=changes)
        else:
            del tensors[name]
        return Published(
            network=published.network,
            release=published.release.model_copy(update={"tensors": tensors}),
            folder=published.folder,
        )

    return edit


def truncate(published: Published) -> Published:
    path = published.folder / "model-00001-of-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    return published


def remove_shard(published: Published) -> Published:
    (published.folder / "model-00001-of-00001.safetensors").unlink()
    return published


SHARD = r"model-00001-of-00001\.safetensors"


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (remove_shard, SHARD + ".*missing"),
        (truncate, SHARD + ".*cannot be read"),
        (edit_manifest("model.norm.weight"), "tensor model.norm.weight: in no shard"),
        (
            edit_manifest("model.norm.weight", dtype="I64"),
            SHARD + ": tensor model.norm.weight: has dtype I64",
        ),
        (
            edit_manifest("model.norm.weight", dtype="F16"),
            SHARD + ": tensor model.norm.weight: is F32 .* release.json says F16",
        ),
        (
            edit_config(intermediate_size=100),
            SHARD + r": tensor model.layers.1.mlp.up_proj.weight: has shape \[96, 64\], "
            r"config.json asks for \[100, 64\]",
        ),
        (
            edit_config(num_hidden_layers=1),
            SHARD + ": tensor model.layers.1.mlp.up_proj.weight: the network .* has no such",
        ),
        (edit_config(tie_word_embeddings=False), None),
        (edit_config(quantization_config={"bits": 4}), "quantised"),
    ],
)
def test_a_bad_release_is_refused_with_file_and_tensor(
    harm: Callable[[Published], Published], reason: str | None, first: Published, tmp_path: Path
) -> None:
    bad = harm(
        changed(
            first.network, tmp_path / "bad", nudge("model.norm.weight", "model.embed_tokens.weight")
        )
    )

    async def scenario() -> list[int]:
        async with engine_with(first) as engine:
            if reason is None:
                # The manifest says what the head is tied to, whatever the configuration says.
                await engine.stage(bad.release, bad.folder)
                await engine.unload(bad.id)
            else:
                with pytest.raises(StageError, match=reason):
                    await engine.stage(bad.release, bad.folder)
                assert list(engine.resident_releases()) == [first.id]
            return tokens(await ask(engine, first.id, greedy(prompt(5))))

    assert asyncio.run(scenario()) == expected(first.network, prompt(5))


TIED = {
    "llama": llama_config(tie_word_embeddings=True),
    "gpt2": GPT2Config(
        vocab_size=211, n_embd=64, n_layer=2, n_head=4, n_positions=128, initializer_range=0.3
    ),
}


def saved_by_torch(network: Any, home: Path) -> Published:
    """As people save one: a tied head stands in the state dict beside its embedding."""
    source = home / "checkpoint"
    source.mkdir(parents=True)
    network.config.architectures = [type(network).__name__]
    network.config.save_pretrained(source)
    torch.save(network.state_dict(), source / "pytorch_model.bin")
    release = publish_folder(home / "releases", source)
    return Published(network=network, release=release, folder=home / "releases" / release.id)


@pytest.mark.parametrize("name", TIED)
def test_a_tied_head_may_be_stored_if_it_is_the_embedding(name: str, tmp_path: Path) -> None:
    published = saved_by_torch(build(TIED[name]), tmp_path)
    assert "lm_head.weight" in published.release.tensors
    assert verify_release(published.folder) == ()

    async def scenario() -> list[int]:
        async with engine_with(published) as engine:
            return tokens(await ask(engine, published.id, greedy(prompt(5))))

    assert asyncio.run(scenario()) == expected(published.network, prompt(5))


@pytest.mark.parametrize("name", TIED)
def test_a_stored_head_that_is_not_what_it_is_tied_to_is_refused(name: str, tmp_path: Path) -> None:
    good = saved_by_torch(build(TIED[name]), tmp_path)
    # Whichever of the two is taken for the network's own, the other one differs.
    bad = edit_manifest("lm_head.weight", digest="blake3:" + "0" * 64)(good)

    async def scenario() -> None:
        async with engine_with() as engine:
            with pytest.raises(
                StageError, match=r"\.bin: tensor .*: differs from .*config\.json ties"
            ):
                await engine.stage(bad.release, bad.folder)

    asyncio.run(scenario())


@pytest.mark.parametrize("says", [False, None])
def test_a_head_that_is_missing_is_no_tie(says: bool | None, tmp_path: Path) -> None:
    """By its config, or by silence, which for a Llama means the same: nothing goes live with the
    embedding as its head."""
    network = build(llama_config())
    source = tmp_path / "checkpoint"
    network.save_pretrained(source)
    (source / "model.safetensors").unlink()
    state = {name: each for name, each in network.state_dict().items() if name != "lm_head.weight"}
    save_file(state, source / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    del config["tie_word_embeddings"]
    config |= {} if says is None else {"tie_word_embeddings": says}
    (source / "config.json").write_text(json.dumps(config))

    release = publish_folder(tmp_path / "releases", source)
    folder = tmp_path / "releases" / release.id
    (reason,) = verify_release(folder)
    assert reason.startswith("release.json: tensor lm_head.weight: missing")

    async def scenario() -> None:
        as_it_is = manifest_of_folder(source, "answers")
        async with engine_with() as engine:
            for asked in ((release, folder), (as_it_is, source)):
                with pytest.raises(StageError, match=r"tensor lm_head\.weight: in no shard"):
                    await engine.stage(*asked)

    asyncio.run(scenario())


def test_every_reason_is_given_at_once(first: Published) -> None:
    bad = edit_manifest("model.norm.weight")(edit_config(intermediate_size=100)(first))

    async def scenario() -> tuple[str, ...]:
        async with engine_with() as engine:
            with pytest.raises(StageError) as raised:
                await engine.stage(bad.release, bad.folder)
            return raised.value.reasons

    assert len(asyncio.run(scenario())) == 1 + 2 * 3


def test_too_little_memory_is_found_before_anything_is_read(
    first: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "free_bytes", lambda device: 300 << 20)
    monkeypatch.setattr(loading, "read_tensors", None)

    async def scenario(**settings: int) -> None:
        async with engine_with(**settings) as engine:
            await engine.stage(first.release, first.folder)

    with pytest.raises(StageError, match=r"too little memory.*314572800 are free"):
        asyncio.run(scenario(memory_reserve_bytes=310 << 20))
    with pytest.raises(StageError, match="one sequence of 128 tokens needs 65536 bytes"):
        asyncio.run(scenario(kv_cache_bytes=65535, max_context=128))


def test_a_device_that_is_not_there_is_named() -> None:
    for device in ("gpu", "cuda:99"):
        with pytest.raises(ServingError, match=rf"\[serving.torch\] device '{device}': "):
            create_engine(device=device)


def test_a_context_that_does_not_fit_is_lowered_to_one_that_does(first: Published) -> None:
    async def scenario(**settings: int) -> int | None:
        async with engine_with(first, **settings) as engine:
            return engine.max_context(first.release.id)

    assert asyncio.run(scenario()) == 128
    assert asyncio.run(scenario(max_context=40)) == 40
    # 512 bytes a token: there is room for 127, and so for four sequences of 31.
    assert asyncio.run(scenario(kv_cache_bytes=65535)) == 31


def test_a_third_release_waits_until_one_of_two_ends(tmp_path: Path) -> None:
    config = llama_config()
    a, b, c = (publish(build(config, seed), tmp_path / str(seed)) for seed in (1, 2, 3))

    async def scenario() -> None:
        async with engine_with(a, b) as engine:
            running = engine.generate(a.id, greedy(prompt(5), max_tokens=100))
            await anext(running)
            await engine.unload(a.id)
            staging_c = asyncio.create_task(engine.stage(c.release, c.folder))
            await asyncio.sleep(0)
            assert set(engine.resident_releases()) == {a.id, b.id}
            rest = tokens([step async for step in running])
            assert rest == expected(a.network, prompt(5), 100)[1:]
            await staging_c
            assert set(engine.resident_releases()) == {b.id, c.id}

    asyncio.run(scenario())


def test_a_third_release_is_refused_in_the_end(tmp_path: Path) -> None:
    a, b, c = (publish(build(llama_config(), seed), tmp_path / str(seed)) for seed in (1, 2, 3))

    async def scenario() -> None:
        async with engine_with(a, b, stage_wait_seconds=0.05) as engine:
            with pytest.raises(StageError, match=f"no room, {a.id} and {b.id} are resident"):
                await engine.stage(c.release, c.folder)

    asyncio.run(scenario())


def test_a_rollback_finds_the_release_that_has_not_left(tmp_path: Path) -> None:
    a, b = (publish(build(llama_config(), seed), tmp_path / str(seed)) for seed in (1, 2))

    async def scenario() -> list[int]:
        async with engine_with(a, b) as engine:
            running = engine.generate(a.id, greedy(prompt(5), max_tokens=100))
            await anext(running)
            await engine.unload(a.id)
            a_again = engine.stage(a.release, Path("not read"))
            await a_again
            await engine.commit(a.id)
            return tokens(await ask(engine, a.id, greedy(prompt(6))))

    assert asyncio.run(scenario()) == expected(a.network, prompt(6))


def test_memory_goes_with_the_last_generation(first: Published, tmp_path: Path) -> None:
    second = changed(first.network, tmp_path / "b", nudge("model.norm.weight"))

    def watch(engine: TorchEngine, release_id: str) -> dict[str, weakref.ref[Any]]:
        runner = engine._steps._lanes[release_id]._runner
        return {
            "runner": weakref.ref(runner),
            "slots": weakref.ref(runner._slots),
            "norm": weakref.ref(runner._norm),
            "shared": weakref.ref(runner._head),
        }

    async def scenario() -> tuple[set[str], set[str]]:
        async with engine_with(first, second) as engine:
            watched = watch(engine, first.id)
            running = engine.generate(first.id, greedy(prompt(5), max_tokens=50))
            await anext(running)
            await engine.unload(first.id)
            during = {name for name, ref in watched.items() if ref() is not None}
            async for _ in running:
                pass
            await until(lambda: first.id not in engine.resident_releases())
            after = {name for name, ref in watched.items() if ref() is not None}
            await engine.unload(second.id)
            await until(lambda: not engine.resident_releases())
            assert watched["shared"]() is None
            return during, after

    gc.collect()
    gc.disable()
    try:
        during, after = asyncio.run(scenario())
    finally:
        gc.enable()
    assert during == {"runner", "slots", "norm", "shared"}
    assert after == {"shared"}


def test_staging_that_nobody_wants_any_more_stops(
    first: Published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = changed(first.network, tmp_path / "b", nudge("model.norm.weight"))
    started = asyncio.Event()

    async def scenario() -> None:
        async with engine_with(first) as engine:
            loop = asyncio.get_running_loop()
            read = loading.read_tensors

            def announce(*args: Any) -> Any:
                loop.call_soon_threadsafe(started.set)
                return read(*args)

            monkeypatch.setattr(loading, "read_tensors", announce)
            task = asyncio.create_task(engine.stage(second.release, second.folder))
            await started.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert list(engine.resident_releases()) == [first.id]
            await engine.stage(second.release, second.folder)
            await engine.commit(second.id)
            answer = tokens(await ask(engine, second.id, greedy(prompt(5))))
            assert answer == expected(second.network, prompt(5))

    asyncio.run(scenario())


def test_what_is_not_resident_cannot_be_named(first: Published) -> None:
    async def scenario() -> None:
        async with engine_with() as engine:
            with pytest.raises(EngineError, match="not resident"):
                await engine.commit(first.id)
            with pytest.raises(EngineError, match="not resident"):
                engine.generate(first.id, greedy(prompt(5)))
            await engine.unload(first.id)

    asyncio.run(scenario())
