"""Draws: by seed the same, and from the distribution that the settings describe."""

from pathlib import Path

import torch

from serving.engine import Generation
from serving.engines.torch_engine.sampling import sample
from tests.torch_engine_fixtures import (
    ask_all,
    build,
    engine_with,
    llama_config,
    prompt,
    publish,
    sequence,
)

LOGITS = torch.tensor([3.0, 2.0, 1.0, 0.0, -1.0])


def test_a_stop_token_is_not_chosen_before_the_least_number_of_tokens() -> None:
    one = sequence(stop_token_ids=(0,), min_tokens=1, top_k=1)
    assert sample([one], LOGITS[None]) == [1]


def test_what_is_sampled_leaves_the_logits_as_they_are() -> None:
    logits = LOGITS.repeat(3, 1)
    chosen = [
        sequence(seed=1, top_p=0.5, min_p=0.2),
        sequence(temperature=0.0),
        sequence(seed=2, logit_bias={1: 5.0}, presence_penalty=1.0, output=(0,)),
    ]
    sample(chosen, logits)
    assert torch.equal(logits, LOGITS.repeat(3, 1))


async def test_a_seed_gives_the_same_tokens_in_any_company(tmp_path: Path) -> None:
    published = publish(build(llama_config(initializer_range=0.05)), tmp_path)
    seeded = Generation(prompt=prompt(6), max_tokens=20, seed=7)
    others = [Generation(prompt=prompt(5 + i, seed=i), max_tokens=15) for i in range(3)]
    other_seed = Generation(prompt=prompt(6), max_tokens=20, seed=-8)
    async with engine_with(published) as engine:
        first, again, beside, other, unseeded, unseeded_again = [
            await ask_all(engine, published.id, asked)
            for asked in ([seeded], [seeded], [seeded, *others], [other_seed], others, others)
        ]
    assert first == again
    assert beside[0] == first[0]
    assert other != first
    assert unseeded != unseeded_again
