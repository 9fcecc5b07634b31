"""Matrix products: for how many rows they are computed, and with which layout. And the memory of a
release that has left."""

import asyncio
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from serving.engines.torch_engine import engine as engine_module
from serving.engines.torch_engine import llama
from serving.engines.torch_engine.llama import Linear, padded_count
from tests.torch_engine_fixtures import (
    VOCAB,
    Published,
    ask,
    build,
    engine_with,
    greedy,
    llama_config,
    prompt,
    publish,
)

Product = tuple[torch.Size, int]
"""The shape [out, in] of the weight, and the number of rows."""


@pytest.fixture(scope="module")
def releases(tmp_path_factory: pytest.TempPathFactory) -> tuple[Published, Published]:
    home = tmp_path_factory.mktemp("home")
    return publish(build(llama_config(), 1), home), publish(build(llama_config(), 2), home)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[Product]:
    """Those that are computed, in order."""
    computed: list[Product] = []
    multiply = Linear.__call__

    def remember(matrix: Linear, x: Tensor) -> Tensor:
        computed.append((matrix._weight.shape, len(x)))
        return multiply(matrix, x)

    monkeypatch.setattr(Linear, "__call__", remember)
    return computed


def test_the_head_computes_only_the_rows_that_are_asked_for(
    releases: tuple[Published, Published], products: list[Product]
) -> None:
    first = releases[0]
    head, long = (VOCAB, 64), prompt(100)

    async def rows_of_the_head(**changes: int) -> list[int]:
        async with engine_with(first) as engine:
            products.clear()
            await ask(engine, first.id, greedy(long, 1, **changes))
            return [rows for shape, rows in products if shape == head]

    assert asyncio.run(rows_of_the_head()) == [1]
    assert asyncio.run(rows_of_the_head(num_prompt_logprobs=0)) == [padded_count(len(long))]


@given(st.integers(min_value=1, max_value=2_000))
def test_a_batch_is_rounded_up_by_less_than_half(num_rows: int) -> None:
    padded = padded_count(num_rows)
    assert num_rows <= padded < max(num_rows * 1.5, num_rows + 4)
    assert padded_count(padded) == padded


def test_memory_is_given_back_once_a_release_has_left(
    releases: tuple[Published, Published], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = releases

    async def replace() -> None:
        given = asyncio.Event()
        loop = asyncio.get_running_loop()

        def remember() -> None:
            assert runner() is None
            loop.call_soon_threadsafe(given.set)

        async with engine_with(first, second) as engine:
            runner = weakref.ref(engine._steps._schedulers[first.id]._runner)
            monkeypatch.setattr(engine_module, "return_unused_memory", remember)
            await engine.unload(first.id)
            async with asyncio.timeout(10):
                await given.wait()

    asyncio.run(replace())


@pytest.mark.parametrize("fault", [AttributeError("no such operator"), TypeError("2 arguments")])
def test_a_torch_without_the_packed_product_multiplies_with_the_plain_layout(
    fault: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*arguments: object) -> torch.Tensor:
        raise fault

    llama._can_pack.cache_clear()
    weight, x = torch.randn(8, 16), torch.randn(3, 16)
    with monkeypatch.context() as patch:
        patch.setattr(torch.ops.mkldnn, "_linear_pointwise", fail)
        plain = Linear(weight, None)
    llama._can_pack.cache_clear()
    assert not plain.is_packed
    assert torch.equal(plain(x), torch.nn.functional.linear(x, weight))
    assert f"does not multiply packed torch.float32 matrices ({fault})" in caplog.text
    assert Linear(weight, None).is_packed
