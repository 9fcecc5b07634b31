"""How many releases are resident: who waits, who leaves, and that memory goes."""

import asyncio
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest

from serving.engine import EngineError
from serving.engines.torch_engine import staging
from serving.engines.torch_engine.engine import TorchEngine
from tests.torch_engine_changes import changed, first, nudge, until
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
            assert set(engine.residents) == {a.id, b.id}
            rest = tokens([step async for step in running])
            assert rest == expected(a.network, prompt(5), 100)[1:]
            await staging_c
            assert set(engine.residents) == {b.id, c.id}

    asyncio.run(scenario())


def test_a_release_that_has_not_left_is_loaded_again_when_it_has(tmp_path: Path) -> None:
    a, b = (publish(build(llama_config(), seed), tmp_path / str(seed)) for seed in (1, 2))

    async def scenario() -> list[int]:
        async with engine_with(a, b) as engine:
            running = engine.generate(a.id, greedy(prompt(5), max_tokens=100))
            await anext(running)
            await engine.unload(a.id)
            staging = asyncio.create_task(engine.stage(a.release, a.folder))
            rest = tokens([step async for step in running])
            assert rest == expected(a.network, prompt(5), 100)[1:]
            await staging
            await engine.commit(a.id)
            return tokens(await ask(engine, a.id, greedy(prompt(6))))

    assert asyncio.run(scenario()) == expected(a.network, prompt(6))


def test_memory_goes_with_the_last_generation(first: Published, tmp_path: Path) -> None:
    second = changed(first.network, tmp_path / "b", nudge("model.norm.weight"))

    def watch(engine: TorchEngine, release_id: str) -> dict[str, weakref.ref[Any]]:
        runner = engine._steps._schedulers[release_id]._runner
        return {
            "runner": weakref.ref(runner),
            "slots": weakref.ref(runner.slots[0]),
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
            await until(lambda: first.id not in engine.residents)
            after = {name for name, ref in watched.items() if ref() is not None}
            await engine.unload(second.id)
            await until(lambda: not engine.residents)
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

    asyncio.run(scenario())


def test_what_is_not_resident_cannot_be_named(first: Published) -> None:
    async def scenario() -> None:
        async with engine_with() as engine:
            with pytest.raises(EngineError, match="not resident"):
                await ask(engine, first.id, greedy(prompt(5)))
            await engine.unload(first.id)

    asyncio.run(scenario())
