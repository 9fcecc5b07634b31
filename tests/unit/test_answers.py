"""An answer: what fails, the order of its sequences and when their slots are free, its echo. A
request that ends while it is let in gives its place back."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest
from starlette.requests import Request
from tokenizers import processors

from serving.admission import Admission, LoadedRelease
from serving.answer import Answers, generate
from serving.completions import plan_completion
from serving.detokenizer import Delta, TokenText
from serving.engine import EngineError, Generation, Step, TokenLogprob
from serving.metrics import Metrics
from serving.openai_schemas import CompletionRequest
from serving.settings import ServingSettings
from tests.echo_engine import EchoEngine
from tests.serving_fixtures import EOS, byte_tokenizer, echo_release, live_release


@pytest.fixture
def live(tmp_path: Path) -> LoadedRelease:
    release = echo_release(tmp_path, 1)
    return live_release(release, tmp_path / release.id)


class Panic(BaseException):
    """As a panic of a library in Rust: not an `Exception`."""


class PanickingEngine(EchoEngine):
    async def generate(self, release_id: str, generation: Generation) -> AsyncGenerator[Step, None]:
        if generation.seed == 8:
            raise Panic
        yield Step(token_ids=(65,))
        await asyncio.Event().wait()


def test_one_sequence_that_fails_in_any_way_ends_all(live: LoadedRelease) -> None:
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


async def test_what_arrives_together_is_in_the_order_of_the_sequences(live: LoadedRelease) -> None:
    request = CompletionRequest.model_validate({"prompt": "a", "n": 16, "max_tokens": 1})
    plan = plan_completion(request, live)
    deltas = generate(OneTokenEngine(), live, plan.generations, request)
    found = list(dict.fromkeys([number async for number, _ in deltas]))
    assert found == list(range(16))


class EndlessEngine(EchoEngine):
    num_ended = 0
    fault: EngineError | None = None
    """What is raised when a sequence is ended."""

    async def generate(self, release_id: str, generation: Generation) -> AsyncGenerator[Step, None]:
        try:
            while True:
                yield Step(token_ids=(65,))
        finally:
            self.num_ended += 1
            if self.fault is not None:
                raise self.fault


async def test_a_sequence_that_fails_when_it_is_ended_holds_nothing_up(live: LoadedRelease) -> None:
    request = CompletionRequest.model_validate({"prompt": "a", "n": 3})
    plan = plan_completion(request, live)
    engine = EndlessEngine()
    engine.fault = EngineError("the connection is gone")
    tasks = asyncio.all_tasks()
    async with asyncio.timeout(10):
        deltas = generate(engine, live, plan.generations, request)
        await anext(deltas)
        await deltas.aclose()
    assert asyncio.all_tasks() == tasks
    assert engine.num_ended == 3


@pytest.mark.parametrize("n", [1, 2])
async def test_a_stop_string_frees_the_slot_before_the_last_delta(
    live: LoadedRelease, n: int
) -> None:
    stop = live.tokenizer.decode([65, 65])
    request = CompletionRequest.model_validate({"prompt": "a", "n": n, "stop": stop})
    plan = plan_completion(request, live)
    engine = EndlessEngine()
    deltas = generate(engine, live, plan.generations, request)
    found = [engine.num_ended async for _, delta in deltas if delta.finish_reason]
    assert min(found) >= 1


A, B = byte_tokenizer().encode("ab").ids


@pytest.mark.parametrize(
    ("body", "text", "offsets"),
    [
        # The tokenizer puts an <eos> before each text; it is not part of the prompt's text.
        ({"prompt": "ab"}, "ab", [0, 0, 1]),
        ({"prompt": "a<eos>b"}, "a<eos>b", [0, 0, 1, 6]),
        ({"prompt": "<eos>b", "skip_special_tokens": False}, "<eos>b", [0, 0, 5]),
        ({"prompt": "<eos>b", "add_special_tokens": False}, "<eos>b", [0, 5]),
        ({"prompt": [EOS, A, EOS, B]}, "ab", [0, 0, 1, 1]),
        (
            {"prompt": [EOS, A, EOS, B], "skip_special_tokens": False},
            "<eos>a<eos>b",
            [0, 5, 6, 11],
        ),
        ({"prompt": [EOS, *byte_tokenizer().encode("é").ids, EOS, B]}, "éb", [0, 0, 0, 1, 1]),
    ],
)
def test_offsets_point_into_the_echo(
    tmp_path: Path, body: dict[str, Any], text: str, offsets: list[int]
) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<eos> $A", special_tokens=[("<eos>", EOS)]
    )
    release = echo_release(tmp_path, 1, tokenizer=tokenizer)
    live = live_release(release, tmp_path / release.id)
    request = CompletionRequest.model_validate({**body, "echo": True, "logprobs": 0})
    plan = plan_completion(request, live)
    one = TokenLogprob(token_id=B, logprob=-1.0)
    answered = Delta(
        text="b",
        tokens=(TokenText(token_id=B, offset=0, logprob=-1.0),),
        step=Step(prompt_logprobs=(one,) * (len(offsets) - 1)),
    )
    choice = plan.choice(0, answered, is_whole=True)
    assert choice is not None
    assert choice["text"] == text + "b"
    assert choice["logprobs"]["text_offset"] == [*offsets, len(text)]


ASKED = CompletionRequest(prompt="Hello")
NEVER = 3600


def answers_over(live: LoadedRelease) -> Answers:
    admission = Admission(10, "answers")
    admission.live = live
    return Answers(
        engine=EchoEngine(step_seconds=NEVER),
        admission=admission,
        settings=ServingSettings(),
        metrics=Metrics("answers"),
        pipeline="answers",
    )


def request_of_a_client_that_stays() -> Request:
    async def receive() -> Any:
        await asyncio.Event().wait()

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "query_string": b"",
        "headers": [],
        "server": ("localhost", 80),
    }
    request = Request(scope, receive)
    request._body = b"{}"  # as if it was read
    return request


async def nothing_is_sent(message: Any) -> None:
    raise AssertionError(message)


@pytest.mark.parametrize("turns", range(6))
async def test_a_deadline_that_ends_as_the_barrier_opens_leaves_nobody_behind(
    live: LoadedRelease, turns: int
) -> None:
    """`turns` of the event loop lie between the moment in which it is let in and the end."""
    answers = answers_over(live)
    admission = answers.admission
    await answers.engine.stage(live.release, live.folder)
    await answers.engine.commit(live.id)
    with admission.closed():
        request = request_of_a_client_that_stays()
        answer = answers.respond(request, ASKED, lambda live: plan_completion(ASKED, live))
        asking = asyncio.create_task(answer(request.scope, request.receive, nothing_is_sent))
        while not admission.num_waiting:
            await asyncio.sleep(0)
    while not admission.num_in_flight:
        await asyncio.sleep(0)
    for _ in range(turns):
        await asyncio.sleep(0)
    # As a timeout does.
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert admission.num_in_flight == 0
    waiting = next(
        line
        for line in generate_latest(answers.metrics.registry).decode().splitlines()
        if line.startswith("vllm:num_requests_waiting{")
    )
    assert waiting.endswith(" 0.0")
