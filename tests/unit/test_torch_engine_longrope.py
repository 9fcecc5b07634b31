"""LongRoPE: an answer depends neither on other sequences nor on how its prompt was divided."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from transformers import Phi3Config

from tests.hub_checkpoints import CONFIGS
from tests.torch_engine_fixtures import (
    Published,
    ask_all,
    build,
    engine_with,
    expected,
    greedy,
    prompt,
    publish,
)

CONTEXT, ORIGINAL = 128, 64
SHORT = prompt(20, seed=1)
FACTORS = [1.0 + 0.5 * number for number in range(8)]


@pytest.fixture
def published(tmp_path: Path) -> Published:
    return with_factors(tmp_path, short=[1.0] * 8, long=FACTORS)


def with_factors(home: Path, *, short: list[float], long: list[float]) -> Published:
    _, settings = CONFIGS["phi3"]
    parameters = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": short,
        "long_factor": long,
        "original_max_position_embeddings": ORIGINAL,
    }
    config = Phi3Config(
        **{**settings, "sliding_window": None},
        original_max_position_embeddings=ORIGINAL,
        rope_parameters=parameters,
    )
    return publish(build(config), home)


def answers(published: Published, *rounds: list[tuple[int, ...]], **settings: Any) -> list[Any]:
    """The answers to the prompts of each round, which are asked at once, after the context."""

    async def scenario() -> list[Any]:
        async with engine_with(published, **settings) as engine:
            found: list[Any] = [engine.max_context(published.id)]
            for prompts in rounds:
                found.append(await ask_all(engine, published.id, map(greedy, prompts)))
            return found

    return asyncio.run(scenario())


def test_by_default_the_context_is_the_one_of_the_short_factors(published: Published) -> None:
    prompts = [SHORT, prompt(50, seed=3)]
    wanted = [expected(published.network, each) for each in prompts]
    assert answers(published, prompts) == [ORIGINAL, wanted]


def test_a_longer_context_is_not_given(published: Published) -> None:
    wanted = expected(published.network, SHORT)
    found = answers(published, [SHORT], max_context=CONTEXT, max_batch_tokens=16)
    assert found == [ORIGINAL, [wanted]]
