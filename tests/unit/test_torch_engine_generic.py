"""Networks of `transformers` share prefixes and give memory up as Llama and its kin do."""

import asyncio
from pathlib import Path

import pytest
from transformers import Phi3Config

from tests.hub_checkpoints import CONFIGS, config_of
from tests.torch_engine_fixtures import (
    ask,
    ask_all,
    build,
    engine_with,
    expected,
    greedy,
    prompt,
    publish,
    tokens,
)

NAMES = ("gemma2", "bloom")
LEAST_BYTES = 128 * 2 * 2 * 4 * 16 * 4
"""One sequence of 128 tokens: 2 layers, keys and values, 4 heads of 16 numbers, 4 bytes. Gemma has
half as many heads."""


@pytest.mark.parametrize("name", NAMES)
async def test_a_shared_beginning_gives_the_same_tokens(name: str, tmp_path: Path) -> None:
    published = publish(build(config_of(name)), tmp_path)
    first = prompt(90, seed=1)
    prompts = [first, first[:80] + prompt(20, seed=2), first[:70] + prompt(5, seed=3), first]
    async with engine_with(published) as engine:
        found = [await ask(engine, published.id, greedy(each)) for each in prompts]
        together = await ask_all(engine, published.id, map(greedy, prompts))
    wanted = [expected(published.network, each) for each in prompts]
    assert [tokens(steps) for steps in found] == wanted == together
    cached = [steps[0].num_cached_tokens for steps in found]
    assert cached[0] == 0 and all(number >= 64 for number in cached[1:])


async def test_networks_of_two_shapes_answer_at_the_same_time(tmp_path: Path) -> None:
    """As while a release of another architecture is swapped in. There is room for one or two
    sequences of each: all begin, and those that came last wait later and go on as they were."""
    both = [publish(build(config_of(name)), tmp_path / name) for name in NAMES]
    prompts = [prompt(length, seed=length) for length in (40, 44, 48, 52, 56, 60)]
    async with engine_with(*both, kv_cache_bytes=LEAST_BYTES) as engine:
        found = await asyncio.gather(
            *(ask_all(engine, each.id, [greedy(one, 40) for one in prompts]) for each in both)
        )
    assert found == [[expected(each.network, one, 40) for one in prompts] for each in both]


@pytest.mark.parametrize("settings", [{}, {"max_context": 128, "max_batch_tokens": 16}])
async def test_longrope_has_the_context_of_its_short_factors(
    settings: dict[str, int], tmp_path: Path
) -> None:
    original = 64
    parameters = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [1.0 + 0.5 * number for number in range(8)],
        "original_max_position_embeddings": original,
    }
    config = Phi3Config(
        **{**CONFIGS["phi3"][1], "sliding_window": None},
        original_max_position_embeddings=original,
        rope_parameters=parameters,
    )
    published = publish(build(config), tmp_path)
    prompts = [prompt(20, seed=1), prompt(50, seed=3)]
    wanted = [expected(published.network, each) for each in prompts]
    async with engine_with(published, **settings) as engine:
        answers = await ask_all(engine, published.id, map(greedy, prompts))
        assert engine.max_context(published.id) == original
    assert answers == wanted
