"""Tokens that nobody reads one by one are handed over several at a time, and are the same."""

import asyncio

import pytest

from serving.engine import Generation, Step
from tests.torch_engine_fixtures import (
    Published,
    ask,
    build,
    engine_with,
    greedy,
    llama_config,
    prompt,
    publish,
    tokens,
)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Published:
    return publish(build(llama_config()), tmp_path_factory.mktemp("home"))


def answers(published: Published, *generations: Generation) -> list[list[Step]]:
    async def all_of_them() -> list[list[Step]]:
        async with engine_with(published) as engine:
            return await asyncio.gather(*(ask(engine, published.id, g) for g in generations))

    return asyncio.run(all_of_them())


def test_the_first_token_comes_at_once_and_the_others_together(published: Published) -> None:
    asked = greedy(prompt(5), max_tokens=12, max_step_tokens=4)
    (steps,) = answers(published, asked)
    assert [len(step.token_ids) for step in steps] == [1, 4, 4, 3]
    assert [step.finish_reason for step in steps] == [None, None, None, "length"]


def test_they_are_what_single_steps_bring(published: Published) -> None:
    changes = {"num_logprobs": 2, "num_prompt_logprobs": 1, "max_tokens": 11}
    one_by_one, gathered = answers(
        published,
        greedy(prompt(6), **changes),
        greedy(prompt(6), **changes, max_step_tokens=3),
    )
    assert len(gathered) < len(one_by_one)
    assert tokens(gathered) == tokens(one_by_one)
    for steps in (one_by_one, gathered):
        assert all(len(step.logprobs) == len(step.token_ids) for step in steps)
    found, right = (
        [(each.token_id, each.logprob, *each.top) for step in steps for each in step.logprobs]
        for steps in (gathered, one_by_one)
    )
    for (token_id, logprob, *top), (other_id, other_logprob, *other_top) in zip(
        found, right, strict=True
    ):
        assert (token_id, [id for id, _ in top]) == (other_id, [id for id, _ in other_top])
        assert logprob == pytest.approx(other_logprob, abs=1e-4)
    assert gathered[0].prompt_logprobs is not None
    assert all(step.prompt_logprobs is None for step in gathered[1:])


def test_a_stop_token_ends_the_gathering(published: Published) -> None:
    (steps,) = answers(published, greedy(prompt(5), max_tokens=12))
    right = tokens(steps)
    end = next(n for n in range(2, len(right)) if right[n] not in right[:n])
    stop = {"max_tokens": 12, "stop_token_ids": (right[end],)}
    (stopped,) = answers(published, greedy(prompt(5), **stop, max_step_tokens=50))
    assert tokens(stopped) == right[: end + 1]
    assert stopped[-1].finish_reason == "stop"


def test_a_slot_is_free_after_tokens_that_were_gathered_for_nobody(published: Published) -> None:
    async def leave_and_ask() -> list[Step]:
        async with engine_with(published, max_batch=1) as engine:
            leaving = engine.generate(published.id, greedy(prompt(5), 100, max_step_tokens=90))
            await anext(leaving)
            sequence = leaving.ag_frame.f_locals["sequence"]  # type: ignore[attr-defined]
            del leaving
            found = await ask(engine, published.id, greedy(prompt(6), 4))
            assert len(sequence.output) < 100, "it was not cut short"
            return found

    assert len(tokens(asyncio.run(leave_and_ask()))) == 4
