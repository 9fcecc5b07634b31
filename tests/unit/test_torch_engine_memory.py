"""Memory for keys and values: who waits for it, who gives it up, and what stays in it to share."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from serving.engine import Generation, Step
from serving.engines.torch_engine import llama
from serving.engines.torch_engine.slots import Batch
from tests.torch_engine_fixtures import (
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
    until,
)

# 512 bytes for each token's keys and values, and blocks of 64 tokens: the release's context of 512
# takes eight of them.
CONTEXT = 512
BLOCK_BYTES = 64 * 512


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Published:
    network = build(llama_config(max_position_embeddings=CONTEXT))
    return publish(network, tmp_path_factory.mktemp("home"))


def watch(
    engine: Any, release_id: str, before: Callable[[Batch], object] = lambda batch: None
) -> list[Batch]:
    """The batches from now on. `before` is called before each of them is computed."""
    batches: list[Batch] = []
    runner = engine._steps._schedulers[release_id]._runner
    forward = runner.forward

    def watched(batch: Batch) -> Any:
        before(batch)
        batches.append(batch)
        return forward(batch)

    runner.forward = watched
    return batches


def num_prompt_tokens(batches: list[Batch]) -> int:
    return sum(len(chunk.token_ids) for batch in batches for chunk in batch.chunks)


async def test_sequences_that_do_not_fit_together_get_the_tokens_they_get_alone(
    published: Published,
) -> None:
    asked = [
        Generation(
            prompt=prompt(40 + 3 * i, seed=i),
            max_tokens=80,
            temperature=1.0 if i % 2 else 0.0,
            seed=i,
            repetition_penalty=1.2 if i % 3 == 0 else 1.0,
            num_logprobs=1,
            max_step_tokens=1 + 3 * (i % 2),
        )
        for i in range(8)
    ]

    async with engine_with(published) as engine:
        right = [await ask(engine, published.id, one) for one in asked]
    async with engine_with(published, kv_cache_bytes=9 * BLOCK_BYTES) as engine:
        batches = watch(engine, published.id)
        found = await asyncio.gather(*(ask(engine, published.id, one) for one in asked))
    assert num_prompt_tokens(batches) > sum(len(one.prompt) for one in asked), (
        "nobody had to read again"
    )
    for steps, alone_steps in zip(found, right, strict=True):
        assert tokens(steps) == tokens(alone_steps)
        assert all(len(step.logprobs) == len(step.token_ids) for step in steps)
        for one, other in zip(logprobs(steps), logprobs(alone_steps), strict=True):
            assert one == pytest.approx(other, abs=1e-4)


def logprobs(steps: list[Step]) -> list[float]:
    return [each.logprob for step in steps for each in step.logprobs]


async def test_a_stream_that_fills_the_old_release_holds_back_nobody_on_the_new_one(
    published: Published, tmp_path: Path
) -> None:
    other = publish(build(published.network.config, seed=1), tmp_path)
    may_go_on = threading.Event()
    steps: list[str] = []
    async with engine_with(published, kv_cache_bytes=8 * BLOCK_BYTES) as engine:
        old = engine.generate(published.id, greedy(prompt(440), max_tokens=70))
        head = tokens([await anext(old)])
        # The old stream is held until the new one has been asked for.
        watch(engine, published.id, lambda _: may_go_on.wait() and steps.append(published.id))
        waiting = asyncio.create_task(ask(engine, published.id, greedy(prompt(30, seed=1))))
        await engine.stage(other.release, other.folder)
        await engine.commit(other.id)
        watch(engine, other.id, lambda _: steps.append(other.id))
        await engine.unload(published.id)
        new = engine.generate(other.id, greedy(prompt(30, seed=1)))
        may_go_on.set()
        answer = tokens([step async for step in new])
        rest = tokens([step async for step in old])
        waited = tokens(await waiting)
        await until(lambda: list(engine.residents) == [other.id])
    assert head + rest == expected(published.network, prompt(440), 70)
    assert waited == expected(published.network, prompt(30, seed=1))
    assert answer == expected(other.network, prompt(30, seed=1))
    new_ended = len(steps) - steps[::-1].index(other.id)
    assert steps[new_ended:].count(published.id) > 50, "the new one waited"


async def test_a_second_turn_reads_only_what_is_new(published: Published) -> None:
    first = greedy(prompt(100), max_tokens=20)
    async with engine_with(published) as engine:
        said = tokens(await ask(engine, published.id, first))
        # The last token that was said has been generated, and never read.
        second = greedy((*first.prompt, *said, *prompt(10, seed=1)), max_tokens=20)
        batches = watch(engine, published.id)
        answer = await ask(engine, published.id, second)
    assert num_prompt_tokens(batches) == 11
    assert [step.num_cached_tokens for step in answer] == [119, *[0] * 19]
    assert tokens(answer) == expected(published.network, second.prompt, 20)


async def test_a_prefix_is_shared_with_a_sequence_that_runs(published: Published) -> None:
    shared = prompt(100)
    asked = [
        greedy((*shared, *prompt(1 + i, seed=i)), max_tokens=10 + 5 * i, seed=i) for i in range(5)
    ]
    async with engine_with(published, max_batch_tokens=50) as engine:
        batches = watch(engine, published.id)
        answers = await ask_all(engine, published.id, asked)
    assert num_prompt_tokens(batches) == 100 + sum(1 + i for i in range(5))
    assert answers == [expected(published.network, one.prompt, one.max_tokens) for one in asked]


async def test_the_least_recently_used_is_dropped_for_who_needs_the_room(
    published: Published,
) -> None:
    # Eight blocks: three finished sequences of two blocks, and one that runs.
    async with engine_with(published, kv_cache_bytes=8 * BLOCK_BYTES) as engine:
        found = []
        for seed in (0, 1, 2, 0, 3, 0, 1):
            answer = await ask(engine, published.id, greedy(prompt(100, seed), max_tokens=2))
            found.append(answer[0].num_cached_tokens)
            if seed == 3:
                await ask(engine, published.id, greedy(prompt(120, seed=9), max_tokens=2))
    assert found == [0, 0, 0, 99, 0, 99, 0]


@pytest.mark.parametrize("span_bytes", [0, 1 << 14, 1 << 30])
async def test_lengths_and_gaps_of_a_batch_change_no_tokens(
    span_bytes: int, published: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether each sequence attends alone, all together, or those of about one length."""
    monkeypatch.setattr(llama, "_SPAN_BYTES", span_bytes)
    long = greedy(prompt(400), max_tokens=40)
    short = [greedy(prompt(5 + i, seed=i), max_tokens=10 + 7 * (i % 4)) for i in range(9)]
    async with engine_with(published) as engine:
        # Slots that finished sequences leave are not taken while others are empty.
        first, answers = await asyncio.gather(
            ask(engine, published.id, long), ask_all(engine, published.id, short[:5])
        )
        answers += await ask_all(engine, published.id, short[5:])
    assert tokens(first) == expected(published.network, long.prompt, 40)
    assert answers == [expected(published.network, s.prompt, s.max_tokens) for s in short]
