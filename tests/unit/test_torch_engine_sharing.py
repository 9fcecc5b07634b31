"""Two releases side by side: what is shared, what is read, and what that is checked against. Who
waits, who leaves, and that memory goes."""

import asyncio
import gc
import logging
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config

from serving.engine import EngineError
from serving.engines.torch_engine import staging
from serving.engines.torch_engine.engine import TorchEngine
from serving.errors import ReleaseError
from tests.hub_checkpoints import config_of
from tests.swap_bytes import staged_bytes
from tests.torch_engine_fixtures import (
    Published,
    ask,
    build,
    changed,
    engine_with,
    expected,
    first,
    flip,
    greedy,
    llama_config,
    nudge,
    prompt,
    publish,
    tokens,
    until,
)

__all__ = ["first"]


HEAD_NORMS = Qwen3Config(**llama_config(tie_word_embeddings=True).to_diff_dict() | {"head_dim": 16})


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        (llama_config(attention_bias=True, mlp_bias=True), "float32"),
        (HEAD_NORMS, "float32"),
        # Norms are held in float32 there, unlike the other tensors.
        (HEAD_NORMS, "bfloat16"),
        (config_of("gpt2"), "float32"),
    ],
    ids=["biases", "tied", "bfloat16", "of transformers"],
)
async def test_one_changed_unit_is_all_that_is_read(
    config: Any, dtype: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whichever it is, the release then answers as after a cold start."""
    caplog.set_level(logging.INFO)
    network: Any = build(config, dtype=getattr(torch, dtype))
    first = publish(network, tmp_path / "first")
    names = [name for name, _ in network.named_parameters() if ".1." not in name]
    seconds = [
        changed(network, tmp_path / str(number), nudge(name)) for number, name in enumerate(names)
    ]
    async with engine_with(first, dtype=dtype) as engine:
        for name, second in zip(names, seconds, strict=True):
            await engine.stage(second.release, second.folder)
            await engine.commit(second.id)
            read = staged_bytes(caplog, second.id)
            parameters = dict(second.network.named_parameters())
            whole = sum(each.nbytes for each in parameters.values())
            assert parameters[name].nbytes <= read < 0.2 * whole, name
            if dtype == "float32":
                answer = tokens(await ask(engine, second.id, greedy(prompt(7), 4)))
                assert answer == expected(second.network, prompt(7), 4), name
            await engine.unload(second.id)
            await until(lambda: list(engine.residents) == [first.id])


async def test_bytes_that_are_not_the_manifests_are_refused_if_they_would_be_read(
    first: Published, tmp_path: Path
) -> None:
    changed_name, same = "model.layers.1.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"
    second = changed(first.network, tmp_path / "b", nudge(changed_name))
    file = second.release.tensors[changed_name].file
    async with engine_with(first) as engine:
        flip(second, changed_name)
        with pytest.raises(ReleaseError, match=f"{file}: tensor {changed_name}: digest is"):
            await engine.stage(second.release, second.folder)
        flip(second, changed_name)
        # Nobody serves these: what is in memory is taken.
        flip(second, same)
        await engine.stage(second.release, second.folder)
        await engine.commit(second.id)
        answer = tokens(await ask(engine, second.id, greedy(prompt(5))))
    async with engine_with() as cold:
        with pytest.raises(ReleaseError, match=f"tensor {same}: digest is"):
            await cold.stage(second.release, second.folder)
    assert answer == expected(second.network, prompt(5))


@pytest.mark.parametrize("is_the_same", [False, True])
async def test_a_third_release_waits_until_one_of_two_ends(
    is_the_same: bool, tmp_path: Path
) -> None:
    """So does a release that has not left yet: it is loaded again."""
    a, b, c = (publish(build(llama_config(), seed), tmp_path / str(seed)) for seed in (1, 2, 3))
    third = a if is_the_same else c
    async with engine_with(a, b) as engine:
        running = engine.generate(a.id, greedy(prompt(5), max_tokens=100))
        await anext(running)
        await engine.unload(a.id)
        staging = asyncio.create_task(engine.stage(third.release, third.folder))
        await asyncio.sleep(0)
        assert set(engine.residents) == {a.id, b.id}
        rest = tokens([step async for step in running])
        assert rest == expected(a.network, prompt(5), 100)[1:]
        await staging
        assert set(engine.residents) == {b.id, third.id}
        found = tokens(await ask(engine, third.id, greedy(prompt(6))))
    assert found == expected(third.network, prompt(6))


@pytest.fixture
def no_garbage_is_collected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def test_memory_goes_with_the_last_generation(
    first: Published, tmp_path: Path, no_garbage_is_collected: None
) -> None:
    second = changed(first.network, tmp_path / "b", nudge("model.norm.weight"))

    def watch(engine: TorchEngine, release_id: str) -> dict[str, weakref.ref[Any]]:
        runner = engine._steps._schedulers[release_id]._runner
        return {
            "runner": weakref.ref(runner),
            "slots": weakref.ref(runner.layer_slots[0]),
            "norm": weakref.ref(runner._norm),
            "shared": weakref.ref(runner._head),
        }

    async with engine_with(first, second) as engine:
        watched = watch(engine, first.id)
        running = engine.generate(first.id, greedy(prompt(5), max_tokens=50))
        await anext(running)
        await engine.unload(first.id)
        during = {name for name, ref in watched.items() if ref() is not None}
        async for _ in running:
            pass
        await until(lambda: first.id not in engine.residents)
        after = {name for name, ref in watched.items() if ref() is not None}
        await engine.unload(second.id)
        await until(lambda: not engine.residents)
        assert watched["shared"]() is None
    assert during == {"runner", "slots", "norm", "shared"}
    assert after == {"shared"}


async def test_staging_that_nobody_wants_any_more_stops(
    first: Published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = changed(first.network, tmp_path / "b", nudge("model.norm.weight"))
    started = asyncio.Event()
    async with engine_with(first) as engine:
        loop = asyncio.get_running_loop()
        read = staging.read_tensors

        def announce(*args: Any) -> Any:
            loop.call_soon_threadsafe(started.set)
            return read(*args)

        monkeypatch.setattr(staging, "read_tensors", announce)
        task = asyncio.create_task(engine.stage(second.release, second.folder))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert list(engine.residents) == [first.id]
        await engine.stage(second.release, second.folder)
        await engine.commit(second.id)
        answer = tokens(await ask(engine, second.id, greedy(prompt(5))))
        assert answer == expected(second.network, prompt(5))


async def test_what_is_not_resident_cannot_be_named(first: Published) -> None:
    async with engine_with() as engine:
        with pytest.raises(EngineError, match="not staged"):
            await ask(engine, first.id, greedy(prompt(5)))
        await engine.unload(first.id)
