"""An engine under test with two releases: what clients ask of it, and what they must be told."""

import json
import threading
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from serving.engine import Engine, Generation
from serving.tokenizer import load_tokenizer
from serving.weights.release import Release
from tests.serving_fixtures import ADMIN_TOKEN

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


def keep_asking(
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
        check_said(bench, cold, said)
        seen |= {each.release for each in said}
        number += 1
    return seen


def check_said(
    bench: EngineBench, cold: dict[str, Cold], said: list[Said], only: str | None = None
) -> None:
    assert len({each.release for each in said}) == 1, "one request, two releases"
    for each in said:
        assert only is None or each.release == only
        assert each.text == cold[each.release].texts[each.prompt]
        assert each.tokens == cold[each.release].tokens[each.prompt]
        expected = cold[each.release].logprobs[each.prompt]
        assert each.logprobs == pytest.approx(expected, abs=bench.logprob_tolerance)


def completion_of(prompt: str | list[str]) -> dict[str, object]:
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


def cached_tokens(http: httpx.Client, prompt: str) -> int:
    """Of how many tokens of the prompt the engine had the keys and values."""
    usage = _post(http, **completion_of(prompt))["usage"]
    found: int = usage["prompt_tokens_details"]["cached_tokens"]
    return found


def ask_whole(http: httpx.Client, _: EngineBench, prompt: str) -> list[Said]:
    return _said([prompt], _post(http, **completion_of(prompt)))


def ask_many(http: httpx.Client, _: EngineBench, prompt: str) -> list[Said]:
    return _said([prompt] * 3, _post(http, **completion_of(prompt), n=3))


def ask_list(http: httpx.Client, bench: EngineBench, prompt: str) -> list[Said]:
    """All prompts, this one first: an answer in another's place would show."""
    prompts = [prompt, *(other for other in bench.prompts if other != prompt)]
    return _said(prompts, _post(http, **completion_of(prompts)))


def ask_stream(http: httpx.Client, _: EngineBench, prompt: str) -> list[Said]:
    body = {**completion_of(prompt), "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as stream:
        assert stream.status_code == 200
        lines = [line[6:] for line in stream.iter_lines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return joined_stream(prompt, [json.loads(line) for line in lines])


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


def joined_stream(prompt: str, chunks: list[dict[str, Any]]) -> list[Said]:
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
