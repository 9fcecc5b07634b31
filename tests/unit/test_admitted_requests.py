"""A request that ends while it is let in gives its place back."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest
from starlette.requests import Request

from serving.admission import Admission
from serving.answer import Answers
from serving.completions import plan_completion
from serving.metrics import Metrics
from serving.openai_schemas import CompletionRequest
from serving.settings import ServingSettings
from tests.echo_engine import EchoEngine
from tests.serving_fixtures import echo_release, live_release

ASKED = CompletionRequest(prompt="Hello")
NEVER = 3600


def answers_over(pipeline_dir: Path) -> Answers:
    release = echo_release(pipeline_dir, 1)
    folder = pipeline_dir / release.id
    admission = Admission(10, "answers")
    admission.live = live_release(release, folder)
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
    tmp_path: Path, turns: int
) -> None:
    """`turns` of the event loop lie between the moment in which it is let in and the end."""
    answers = answers_over(tmp_path)
    admission = answers.admission
    assert admission.live is not None
    await answers.engine.stage(admission.live.release, admission.live.folder)
    await answers.engine.commit(admission.live.id)
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
