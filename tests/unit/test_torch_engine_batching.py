"""Sequences that come, run and go together do not change each other."""

import asyncio
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from serving.engine import EngineError
from serving.engines.torch_engine import scheduler
from serving.engines.torch_engine.engine import TorchEngine
from serving.engines.torch_engine.slots import Batch
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
    until,
)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Published:
    return publish(build(llama_config()), tmp_path_factory.mktemp("home"))


def scheduler_of(engine: TorchEngine, release_id: str) -> Any:
    return engine._steps._schedulers[release_id]


@pytest.fixture
def slow_prompts(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[tuple[bool, int]]]:
    """On a clock of its own, a runner takes 2 ms for each token of a prompt. Whether each of its
    steps decodes, and how many prompt tokens it reads."""

    def slow_down(runner: Any, decoding_seconds: float = 0.0) -> list[tuple[bool, int]]:
        now, sizes, forward = 0.0, [], runner.forward

        def slow(batch: Batch) -> Any:
            nonlocal now
            count = sum(len(chunk.token_ids) for chunk in batch.chunks)
            now += 0.002 * count + (decoding_seconds if batch.slots else 0)
            sizes.append((bool(batch.token_ids), count))
            return forward(batch)

        monkeypatch.setattr(scheduler.time, "perf_counter", lambda: now)
        runner.forward = slow
        return sizes

    return slow_down


@pytest.mark.parametrize("decoding_seconds", [0.0, 0.03])
async def test_a_step_beside_running_streams_keeps_to_its_seconds(
    decoding_seconds: float, published: Published, slow_prompts: Any
) -> None:
    """The time that the streams take themselves does not count."""
    # Nothing is known of the first: 16. Each of the next ones has 0.051 s at 2 ms a token.
    # Not a multiple of 2 ms: the learned speed differs from it by rounding.
    async with engine_with(published, step_seconds=0.051) as engine:
        runner = scheduler_of(engine, published.id)._runner
        sizes = slow_prompts(runner, decoding_seconds)
        running = engine.generate(published.id, greedy(prompt(5), max_tokens=100))
        for _ in range(3):
            await anext(running)
        await ask(engine, published.id, greedy(prompt(100, seed=1), max_tokens=1))
        found = [count for decodes, count in sizes if decodes and count]
    assert found == [16, 25, 25, 25, 9]


async def test_streams_of_one_release_wait_for_the_prompts_of_the_other_no_longer(
    published: Published, tmp_path: Path, slow_prompts: Any
) -> None:
    other = publish(build(llama_config(), seed=1), tmp_path)
    # Each of two schedulers has half of 0.1 s: 25 tokens at 2 ms.
    async with engine_with(published, other, step_seconds=0.1) as engine:
        sizes = slow_prompts(scheduler_of(engine, other.id)._runner)
        running = engine.generate(published.id, greedy(prompt(5), max_tokens=100))
        await anext(running)
        await ask(engine, other.id, greedy(prompt(100), max_tokens=0))
        async for _ in running:
            pass
        await until(lambda: not engine._steps.is_busy)
        await ask(engine, other.id, greedy(prompt(100, seed=1), max_tokens=0))
        found = [count for _, count in sizes]
    assert found == [16, 25, 25, 25, 9, 100]


@pytest.mark.parametrize("how", ["closed", "dropped", "cancelled"])
async def test_a_stream_that_ends_early_frees_its_slot(how: str, published: Published) -> None:
    async with engine_with(published, max_batch=1) as engine:
        stream: Any = engine.generate(published.id, greedy(prompt(5), max_tokens=120))
        await anext(stream)
        if how == "closed":
            await stream.aclose()
            assert [step async for step in stream] == []
        elif how == "dropped":
            del stream
            gc.collect()
        else:
            waiting = asyncio.create_task(ask(engine, published.id, greedy(prompt(6), 100)))
            await stream.aclose()
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait([waiting])
            del waiting
            gc.collect()
        async with asyncio.timeout(10):
            answer = tokens(await ask(engine, published.id, greedy(prompt(7))))
        await until(lambda: not engine._steps.is_busy)
    assert answer == expected(published.network, prompt(7))


async def test_a_failing_step_fails_its_requests_and_no_later_one(published: Published) -> None:
    async with engine_with(published) as engine:
        runner = scheduler_of(engine, published.id)._runner
        forward = runner.forward

        def fail(batch: Batch) -> Any:
            raise RuntimeError("out of luck")

        runner.forward = fail
        both = await asyncio.gather(
            *(ask(engine, published.id, greedy(prompt(5 + i))) for i in range(2)),
            return_exceptions=True,
        )
        assert all(isinstance(one, EngineError) and "out of luck" in str(one) for one in both)
        runner.forward = forward
        found = tokens(await ask(engine, published.id, greedy(prompt(5))))
    assert found == expected(published.network, prompt(5))


async def test_a_dead_engine_says_so(published: Published) -> None:
    async with engine_with(published) as engine:

        def die(batch: Batch) -> Any:
            raise SystemExit("killed")

        scheduler_of(engine, published.id)._runner.forward = die
        with pytest.raises(EngineError, match="thread died"):
            await ask(engine, published.id, greedy(prompt(5)))
        with pytest.raises(EngineError, match="thread died"):
            await ask(engine, published.id, greedy(prompt(5)))
        await engine.unload(published.id)
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="thread died"):
            await engine.stage(published.release, published.folder)


async def test_closing_ends_what_runs(published: Published) -> None:
    async with engine_with(published) as engine:
        stream = engine.generate(published.id, greedy(prompt(5), max_tokens=120))
        await anext(stream)
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            async for _ in stream:
                pass
        with pytest.raises(EngineError, match="closed"):
            await ask(engine, published.id, greedy(prompt(5)))


async def test_a_prompt_that_does_not_fit_is_refused(published: Published) -> None:
    """The prompts of requests were checked before, but not the texts of a probe."""
    async with engine_with(published) as engine:
        with pytest.raises(EngineError, match="129 tokens does not fit"):
            await ask(engine, published.id, greedy(prompt(129)))


async def test_the_first_token_comes_at_once_and_the_others_together(published: Published) -> None:
    async with engine_with(published) as engine:
        asked = greedy(prompt(5), max_tokens=12, max_step_tokens=4)
        steps = await ask(engine, published.id, asked)
    assert [len(step.token_ids) for step in steps] == [1, 4, 4, 3]
    assert [step.finish_reason for step in steps] == [None, None, None, "length"]
