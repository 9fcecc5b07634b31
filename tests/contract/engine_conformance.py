"""What every engine must keep, behind the real server: one suite, run against each engine.

A test module for an engine subclasses `EngineConformance`, and gives a fixture `bench`, an
`EngineBench`. Class attributes say how much is done.
"""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from serving.engine import Engine, Generation
from serving.tokenizer import load_tokenizer
from serving.weights.release import Release
from serving.weights.releases import served_release, set_current
from tests.serving_fixtures import ADMIN_TOKEN, echo_app, running

MAX_TOKENS = 24


@dataclass(frozen=True, kw_only=True)
class EngineBench:
    """An engine under test and two releases whose top tokens are far enough apart."""

    make_engine: Callable[[], Engine]
    pipeline_dir: Path
    first: Release
    second: Release
    prompts: tuple[str, ...]
    logprob_tolerance: float = 1e-4


@dataclass(kw_only=True)
class Cold:
    """What a release says after a cold start."""

    texts: dict[str, str] = field(default_factory=dict)
    tokens: dict[str, list[str]] = field(default_factory=dict)
    logprobs: dict[str, list[float]] = field(default_factory=dict)


async def cold_answers(bench: EngineBench, release: Release) -> Cold:
    """Greedy tokens straight from a fresh engine, without the server."""
    engine = bench.make_engine()
    folder = bench.pipeline_dir / release.id
    tokenizer = load_tokenizer(folder)
    await engine.stage(release, folder)
    await engine.commit(release.id)
    cold = Cold()
    for prompt in bench.prompts:
        generation = Generation(
            prompt=tokenizer.encode(prompt),
            max_tokens=MAX_TOKENS,
            temperature=0.0,
            num_logprobs=0,
        )
        tokens: list[int] = []
        logprobs: list[float] = []
        async with aclosing(cast(Any, engine.generate(release.id, generation))) as steps:
            async for step in steps:
                tokens += step.token_ids
                logprobs += [each.logprob for each in step.logprobs]
        cold.texts[prompt] = tokenizer.decode(tokens)
        cold.tokens[prompt] = [tokenizer.token_text(token_id) for token_id in tokens]
        cold.logprobs[prompt] = logprobs
    await engine.close()
    return cold


class EngineConformance:
    num_clients = 4
    num_swaps = 12

    @contextmanager
    def serving(self, bench: EngineBench) -> Iterator[str]:
        """A server whose live release is the first; its URL."""
        set_current(bench.pipeline_dir, bench.first.id)
        with running(echo_app(bench.pipeline_dir, bench.make_engine())) as url:
            yield url

    @pytest.fixture
    def cold(self, bench: EngineBench) -> dict[str, Cold]:
        async def both() -> dict[str, Cold]:
            return {
                release.id: await cold_answers(bench, release)
                for release in (bench.first, bench.second)
            }

        found = asyncio.run(both())
        first, second = found[bench.first.id], found[bench.second.id]
        for prompt in bench.prompts:
            assert first.texts[prompt] != second.texts[prompt], "the two cannot be told apart"
        return found

    def test_swaps_under_load_never_lie(self, bench: EngineBench, cold: dict[str, Cold]) -> None:
        """Whole, streamed, `n` and lists, across swaps: nothing failed, aborted or mixed."""
        stop = threading.Event()
        with (
            self.serving(bench) as url,
            httpx.Client(base_url=url, timeout=60) as http,
            ThreadPoolExecutor(self.num_clients) as pool,
        ):
            kinds = [_ask_whole, _ask_stream, _ask_many, _ask_list]
            clients = [
                pool.submit(_client, http, kinds[number % len(kinds)], bench, cold, stop)
                for number in range(self.num_clients)
            ]
            try:
                for number in range(self.num_swaps):
                    release = (bench.second, bench.first)[number % 2]
                    result = swap(http, release.id)
                    assert result.status_code == 200, result.text
                    assert served_release(bench.pipeline_dir) == (bench.pipeline_dir / release.id)
                    _check(
                        bench,
                        cold,
                        _ask_whole(http, bench, bench.prompts[0]),
                        only=release.id,
                    )
            finally:
                stop.set()
            seen = [client.result() for client in clients]
        assert all(seen)
        assert set().union(*seen) == {bench.first.id, bench.second.id}

    def test_there_and_back_again(self, bench: EngineBench, cold: dict[str, Cold]) -> None:
        """A → B → A gives A's tokens again, warm prefixes and all."""
        with (
            self.serving(bench) as url,
            httpx.Client(base_url=url, timeout=60) as http,
        ):
            for release in (bench.first, bench.second, bench.first):
                assert swap(http, release.id).json()["result"] == "live"
                for prompt in bench.prompts:
                    for ask in (_ask_whole, _ask_stream, _ask_many, _ask_list):
                        _check(bench, cold, ask(http, bench, prompt), only=release.id)

    def test_a_stream_ends_on_the_release_that_it_began_on(
        self, bench: EngineBench, cold: dict[str, Cold]
    ) -> None:
        prompt = bench.prompts[0]
        with (
            self.serving(bench) as url,
            httpx.Client(base_url=url, timeout=60) as http,
        ):
            body = {**_body(prompt), "stream": True}
            with http.stream("POST", "/v1/completions", json=body) as stream:
                lines = (line[6:] for line in stream.iter_lines() if line.startswith("data: "))
                chunks = [json.loads(next(lines))]
                with ThreadPoolExecutor(1) as pool:
                    swapping = pool.submit(swap, http, bench.second.id)
                    chunks += [json.loads(line) for line in lines if line != "[DONE]"]
                    assert swapping.result().json()["result"] == "live"
            _check(bench, cold, _joined(prompt, chunks), only=bench.first.id)
            _check(bench, cold, _ask_whole(http, bench, prompt), only=bench.second.id)


@dataclass(frozen=True, kw_only=True)
class Said:
    """One choice as a client has it."""

    prompt: str
    release: str
    text: str
    tokens: list[str]
    logprobs: list[float]


def swap(http: httpx.Client, release: str) -> httpx.Response:
    return http.post(
        "/admin/swap",
        json={"release": release},
        headers={"Authorization": f"Bearer {ADMIN_TOKEN}"},
    )


def _client(
    http: httpx.Client,
    ask: Callable[[httpx.Client, EngineBench, str], list[Said]],
    bench: EngineBench,
    cold: dict[str, Cold],
    stop: threading.Event,
) -> set[str]:
    """Ask until told to stop; the releases that answered."""
    seen: set[str] = set()
    number = 0
    while not stop.is_set() or len(seen) < 1:
        prompt = bench.prompts[number % len(bench.prompts)]
        said = ask(http, bench, prompt)
        _check(bench, cold, said)
        seen |= {each.release for each in said}
        number += 1
    return seen


def _check(
    bench: EngineBench, cold: dict[str, Cold], said: list[Said], only: str | None = None
) -> None:
    assert len({each.release for each in said}) == 1, "one request, two releases"
    for each in said:
        assert only is None or each.release == only
        assert each.text == cold[each.release].texts[each.prompt]
        assert each.tokens == cold[each.release].tokens[each.prompt]
        expected = cold[each.release].logprobs[each.prompt]
        assert each.logprobs == pytest.approx(expected, abs=bench.logprob_tolerance)


def _body(prompt: str | list[str]) -> dict[str, object]:
    return {
        "model": "answers",
        "prompt": prompt,
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "logprobs": 0,
        "ignore_eos": True,
    }


def _post(http: httpx.Client, **body: object) -> dict[str, Any]:
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    content: dict[str, Any] = answer.json()
    assert answer.headers["x-model-release"] == content["system_fingerprint"]
    return content


def _ask_whole(http: httpx.Client, _: EngineBench, prompt: str) -> list[Said]:
    return _said([prompt], _post(http, **_body(prompt)))


def _ask_many(http: httpx.Client, _: EngineBench, prompt: str) -> list[Said]:
    return _said([prompt] * 3, _post(http, **_body(prompt), n=3))


def _ask_list(http: httpx.Client, bench: EngineBench, prompt: str) -> list[Said]:
    """All prompts, this one first: an answer in another's place would show."""
    prompts = [prompt, *(other for other in bench.prompts if other != prompt)]
    return _said(prompts, _post(http, **_body(prompts)))


def _ask_stream(http: httpx.Client, _: EngineBench, prompt: str) -> list[Said]:
    body = {**_body(prompt), "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as stream:
        assert stream.status_code == 200
        lines = [line[6:] for line in stream.iter_lines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return _joined(prompt, [json.loads(line) for line in lines])


def _said(prompts: list[str], content: dict[str, Any]) -> list[Said]:
    choices = content["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["length"] * len(prompts)
    return [
        Said(
            prompt=prompt,
            release=content["system_fingerprint"],
            text=choice["text"],
            tokens=choice["logprobs"]["tokens"],
            logprobs=choice["logprobs"]["token_logprobs"],
        )
        for prompt, choice in zip(prompts, choices, strict=True)
    ]


def _joined(prompt: str, chunks: list[dict[str, Any]]) -> list[Said]:
    (release,) = {chunk["system_fingerprint"] for chunk in chunks}
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert choices[-1]["finish_reason"] == "length"
    return [
        Said(
            prompt=prompt,
            release=release,
            text="".join(choice["text"] for choice in choices),
            tokens=[name for choice in choices for name in choice["logprobs"]["tokens"]],
            logprobs=[p for choice in choices for p in choice["logprobs"]["token_logprobs"]],
        )
    ]
