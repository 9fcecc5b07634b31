"""The sequences of a request: what fails, their order, and when their slots are free."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from serving.admission import LiveRelease
from serving.answer import generate
from serving.completions import plan_completion
from serving.engine import EngineError, Generation, Step
from serving.openai_schemas import CompletionRequest
from tests.echo_engine import EchoEngine
from tests.serving_fixtures import echo_release, live_release


@pytest.fixture
def live(tmp_path: Path) -> LiveRelease:
    release = echo_release(tmp_path, 1)
    folder = tmp_path / release.id
    return live_release(release, folder)


class Panic(BaseException):
    """As a panic of a library in Rust: not an `Exception`."""


class PanickingEngine(EchoEngine):
    async def generate(self, release_id: str, generation: Generation) -> AsyncGenerator[Step, None]:
        if generation.seed == 8:
            raise Panic
        yield Step(token_ids=(65,))
        await asyncio.Event().wait()


def test_one_sequence_that_fails_in_any_way_ends_all(live: LiveRelease) -> None:
    request = CompletionRequest.model_validate({"prompt": "a", "n": 3, "seed": 7})
    plan = plan_completion(request, live)

    async def scenario() -> None:
        async with asyncio.timeout(10):
            async for _ in generate(PanickingEngine(), live, plan.generations, request):
                pass

    with pytest.raises(Panic):
        asyncio.run(scenario())


class OneTokenEngine(EchoEngine):
    async def generate(self, release_id: str, generation: Generation) -> AsyncGenerator[Step, None]:
        yield Step(token_ids=(65,), finish_reason="length")


async def test_what_arrives_together_is_in_the_order_of_the_sequences(live: LiveRelease) -> None:
    request = CompletionRequest.model_validate({"prompt": "a", "n": 16, "max_tokens": 1})
    plan = plan_completion(request, live)
    deltas = generate(OneTokenEngine(), live, plan.generations, request)
    found = list(dict.fromkeys([number async for number, _ in deltas]))
    assert found == list(range(16))


class EngineThatFailsAtTheEnd(EchoEngine):
    num_ended = 0

    async def generate(self, release_id: str, generation: Generation) -> AsyncGenerator[Step, None]:
        try:
            while True:
                yield Step(token_ids=(65,))
        finally:
            self.num_ended += 1
            raise EngineError("the connection is gone")


async def test_a_sequence_that_fails_when_it_is_ended_holds_nothing_up(live: LiveRelease) -> None:
    request = CompletionRequest.model_validate({"prompt": "a", "n": 3})
    plan = plan_completion(request, live)
    engine = EngineThatFailsAtTheEnd()
    tasks = asyncio.all_tasks()
    async with asyncio.timeout(10):
        deltas = generate(engine, live, plan.generations, request)
        await anext(deltas)
        await deltas.aclose()
    assert asyncio.all_tasks() == tasks
    assert engine.num_ended == 3


class EndlessEngine(EchoEngine):
    num_ended = 0

    async def generate(self, release_id: str, generation: Generation) -> AsyncGenerator[Step, None]:
        try:
            while True:
                yield Step(token_ids=(65,))
        finally:
            self.num_ended += 1


@pytest.mark.parametrize("n", [1, 2])
async def test_a_stop_string_frees_the_slot_before_the_last_delta(
    live: LiveRelease, n: int
) -> None:
    stop = live.tokenizer.decode([65, 65])
    request = CompletionRequest.model_validate({"prompt": "a", "n": n, "stop": stop})
    plan = plan_completion(request, live)
    engine = EndlessEngine()
    deltas = generate(engine, live, plan.generations, request)
    found = [engine.num_ended async for _, delta in deltas if delta.finish_reason]
    assert min(found) >= 1
