"""What no request can do to the others: hold up the event loop, use up the threads, fill the
memory; and what a page of another site cannot read."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from serving.admission import LoadedRelease
from serving.answer import generate
from serving.completions import CompletionPlan, encode_prompt, make_generations
from serving.engine import Generation, Step
from serving.openai_schemas import CompletionRequest
from serving.request_errors import RequestError
from serving.tokenizer import ReleaseTokenizer
from serving.weights.release_store import set_current
from tests.contract.engine_bench import swap
from tests.echo_engine import EchoEngine
from tests.jobs_fixtures import until
from tests.serving_fixtures import (
    CHAT_TEMPLATE,
    echo_app,
    echo_release,
    live_release,
    running,
)

LONG = {"prompt": [65] * 2000, "max_tokens": 1, "echo": True, "logprobs": 1}


@contextmanager
def served(pipeline_dir: Path, engine: EchoEngine | None = None, **settings: Any) -> Iterator[str]:
    release = echo_release(pipeline_dir, 1, chat_template=CHAT_TEMPLATE, context=4096)
    set_current(pipeline_dir, release.id)
    with running(echo_app(pipeline_dir, engine, **settings)) as url:
        yield url


@pytest.mark.parametrize("stream", [False, True])
def test_a_large_answer_is_written_off_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    written = CompletionPlan.choice

    def held(*args: Any, **options: Any) -> Any:
        begun.set()
        assert go_on.wait(30)
        return written(*args, **options)

    monkeypatch.setattr(CompletionPlan, "choice", held)
    with served(tmp_path) as url, ThreadPoolExecutor(1) as pool:
        body = {**LONG, "stream": stream}
        asked = pool.submit(httpx.post, f"{url}/v1/completions", json=body, timeout=30)
        assert begun.wait(10)
        try:
            assert httpx.get(f"{url}/health", timeout=10).is_success
        finally:
            go_on.set()
        assert asked.result().is_success


def test_tokenizing_is_bounded_and_leaves_the_threads_of_swaps_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    encode = ReleaseTokenizer.encode

    def held(self: ReleaseTokenizer, text: str, **options: bool) -> tuple[int, ...]:
        if "hold" in text:
            assert go_on.wait(30)
        return encode(self, text, **options)

    monkeypatch.setattr(ReleaseTokenizer, "encode", held)
    max_queue = 40
    set_current(tmp_path, echo_release(tmp_path, 1, chat_template=CHAT_TEMPLATE).id)
    app = echo_app(tmp_path, max_queue=max_queue)
    with running(app) as url, ThreadPoolExecutor(max_queue) as pool:
        new = echo_release(tmp_path, 2, chat_template=CHAT_TEMPLATE, context=4096)
        with httpx.Client(base_url=url, timeout=30) as http:

            def ask() -> httpx.Response:
                body = {"messages": [{"role": "user", "content": "hold"}], "max_tokens": 1}
                return http.post("/v1/chat/completions", json=body)

            asked: list[Future[httpx.Response]] = [pool.submit(ask) for _ in range(max_queue)]
            try:
                until(lambda: app.state.admission.num_in_flight == max_queue)
                assert ask().status_code == 429
                assert swap(http, new.id).json()["result"] == "live"
            finally:
                go_on.set()
            assert all(each.result().is_success for each in asked)


def live_in(pipeline_dir: Path) -> LoadedRelease:
    release = echo_release(pipeline_dir, 1)
    folder = pipeline_dir / release.id
    return live_release(release, folder)


@pytest.mark.parametrize("prompt", ["x" * (128 * 5 + 1), [65] * 129])
def test_a_prompt_that_cannot_fit_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prompt: str | list[int]
) -> None:
    live = live_in(tmp_path)  # its longest token has five characters, its context 128 tokens
    monkeypatch.setattr(ReleaseTokenizer, "encode", None)
    with pytest.raises(RequestError, match=str(len(prompt))) as raised:
        encode_prompt(live, prompt, "prompt", add_special_tokens=True)
    assert raised.value.body["error"]["code"] == "context_length_exceeded"


async def test_a_slow_reader_of_several_sequences_holds_the_engine_up(tmp_path: Path) -> None:
    live = live_in(tmp_path)
    request = CompletionRequest(prompt="Hello", n=3, max_tokens=100, ignore_eos=True, stream=True)
    num_steps = 0

    class Counting(EchoEngine):
        async def generate(self, _: str, generation: Generation) -> AsyncGenerator[Step, None]:
            nonlocal num_steps
            for _number in range(generation.max_tokens):
                num_steps += 1
                yield Step(token_ids=(65,))
                await asyncio.sleep(0)
            yield Step(finish_reason="length")

    generations = make_generations(request, live, (65,), "prompt")
    async with aclosing(generate(Counting(), live, generations, request)) as deltas:
        await anext(deltas)
        for _ in range(500):
            await asyncio.sleep(0)
        # Each sequence has one delta in the queue and waits with the next one.
        assert num_steps <= 3 * 3
        assert sum([delta.num_tokens async for _, delta in deltas]) == 3 * 100 - 1


def test_an_unexpected_error_has_the_form_of_every_error(tmp_path: Path) -> None:
    engine = EchoEngine()
    page = "https://chat.example.com"
    with served(tmp_path, engine, cors_origins=(page,)) as url:
        engine.fail["turn"] = ZeroDivisionError("unexpected")
        answer = httpx.get(f"{url}/live", headers={"Origin": page})
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"
    assert answer.headers["access-control-allow-origin"] == page


@pytest.mark.parametrize("has_key", [False, True])
def test_a_page_with_its_own_host_name_reads_no_answer(tmp_path: Path, has_key: bool) -> None:
    settings = {"api_key": "key"} if has_key else {}
    with served(tmp_path, **settings) as url:
        for host, status in (("localhost:8000", 200), ("evil.example.com:8000", 403)):
            headers = {"Host": host, "Authorization": "Bearer key"}
            for path in ("/v1/models", "/metrics", "/health", "/live", "/docs"):
                answer = httpx.get(f"{url}{path}", headers=headers)
                assert answer.status_code == (200 if has_key else status), (host, path)
                if not has_key and status == 403:
                    assert host in answer.json()["error"]["message"]


def test_a_name_on_which_the_server_listens_is_its_own(tmp_path: Path) -> None:
    with served(tmp_path, host="Box.example") as url:
        assert httpx.get(f"{url}/health", headers={"Host": "box.example:8000"}).is_success
