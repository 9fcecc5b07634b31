"""What stands around all routes; and what is streamed, put together, is what is answered whole."""

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from serving.tokenizer import ReleaseTokenizer
from serving.weights.release_store import set_current
from tests.serving_fixtures import (
    CHAT_TEMPLATE,
    EOS,
    echo_app,
    echo_release,
    running,
)


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    pipeline_dir = tmp_path_factory.mktemp("home") / "answers"
    set_current(pipeline_dir, echo_release(pipeline_dir, 1, chat_template=CHAT_TEMPLATE).id)
    with running(echo_app(pipeline_dir)) as url, httpx.Client(base_url=url) as client:
        yield client


def test_monitors_ask_for_the_head_of_health(http: httpx.Client) -> None:
    health = http.head("/health")
    assert (health.status_code, health.content) == (200, b"")


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_keeps_its_id(http: httpx.Client, stream: bool) -> None:
    body = {"prompt": "Hi", "max_tokens": 1, "stream": stream}
    mine = http.post("/v1/completions", json=body, headers={"X-Request-Id": "mine"})
    assert '"cmpl-mine"' in mine.text
    own = http.post("/v1/completions", json=body)
    assert re.search('"cmpl-[0-9a-f]{32}"', own.text)


def test_the_routes_are_shown_without_anything_from_elsewhere(http: httpx.Client) -> None:
    page = http.get("/docs").text
    assets = re.findall(r'(?:src|href)="([^"]+)"', page)
    assert len(assets) >= 3 and all(asset.startswith("/") for asset in assets)
    assert all(http.get(asset).is_success for asset in assets)
    paths = http.get("/openapi.json").json()["paths"]
    asked = paths["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]
    assert asked["schema"]["$ref"].endswith("/CompletionRequest")


PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-thing"}


def test_pages_elsewhere_read_answers_only_if_the_settings_say_so(
    http: httpx.Client, tmp_path: Path
) -> None:
    page = {"Origin": "https://chat.example.com"}
    closed = http.get("/live", headers=page)
    assert "access-control-allow-origin" not in closed.headers
    assert http.options("/v1/completions", headers={**page, **PREFLIGHT}).status_code == 405
    app = echo_app(tmp_path, cors_origins=("https://chat.example.com",), api_key="key")
    with running(app) as url:
        opened = httpx.options(f"{url}/v1/completions", headers={**page, **PREFLIGHT})
        assert opened.headers["access-control-allow-origin"] == "https://chat.example.com"
        # Who may read is told from who may ask.
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": "Hi"}, headers=page)
        assert answer.status_code == 401
        assert answer.headers["access-control-allow-origin"] == "https://chat.example.com"
        other = httpx.get(f"{url}/live", headers={"Origin": "https://example.org"})
        assert "access-control-allow-origin" not in other.headers


# A short chat too, because its template may take long.
@pytest.mark.parametrize(
    ("route", "length"),
    [("completions", 5000), ("chat/completions", 1)],
)
def test_a_long_prompt_is_read_off_the_loop_and_within_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, route: str, length: int
) -> None:
    release = echo_release(tmp_path, 1, chat_template=CHAT_TEMPLATE, context=8192)
    set_current(tmp_path, release.id)
    begun, go_on = threading.Event(), threading.Event()
    encode = ReleaseTokenizer.encode

    def slow(self: ReleaseTokenizer, text: str, **options: bool) -> tuple[int, ...]:
        if "y" in text:
            begun.set()
            go_on.wait(30)
        return encode(self, text, **options)

    monkeypatch.setattr(ReleaseTokenizer, "encode", slow)
    text = "y" * length
    body = (
        {"prompt": text}
        if route == "completions"
        else {"messages": [{"role": "user", "content": text}]}
    )
    with running(echo_app(tmp_path, request_seconds=3.0)) as url:
        assert httpx.get(f"{url}/health").is_success
        answers: list[httpx.Response] = []
        asking = threading.Thread(
            target=lambda: answers.append(httpx.post(f"{url}/v1/{route}", json=body, timeout=30))
        )
        asking.start()
        assert begun.wait(10)
        # The loop answers others meanwhile.
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "Hi"}).is_success
        asking.join()
        go_on.set()
    assert answers[0].status_code == 504
    assert answers[0].json()["error"]["code"] == "deadline_exceeded"
    assert answers[0].headers["x-should-retry"] == "false"


def whole(http: httpx.Client, route: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = http.post(f"/v1/{route}", json=body)
    assert answer.status_code == 200, answer.text
    content: dict[str, Any] = answer.json()
    return content


def streamed(http: httpx.Client, route: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks."""
    with http.stream("POST", f"/v1/{route}", json={**body, "stream": True}) as stream:
        assert stream.status_code == 200
        lines = [line[6:] for line in stream.iter_lines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def joined_completions(chunks: list[dict[str, Any]], number: int) -> list[dict[str, Any]]:
    choices: list[dict[str, Any]] = [
        {"index": index, "text": "", "logprobs": {}, "finish_reason": None, "stop_reason": None}
        for index in range(number)
    ]
    for chunk in chunks:
        for each in chunk["choices"]:
            choice = choices[each["index"]]
            assert choice["finish_reason"] is None, "something came after the end"
            choice["text"] += each["text"]
            choice["finish_reason"] = each["finish_reason"]
            choice["stop_reason"] = each["stop_reason"]
            for name, values in each["logprobs"].items():
                choice["logprobs"][name] = choice["logprobs"].get(name, []) + values
    return choices


@pytest.mark.parametrize(
    "prompt",
    [
        ["Hello", "Grüße, 世界"],
        [[72, 105], [200, EOS, 201]],
        # Of no text: what is known of its tokens must come all the same.
        [[EOS, EOS]],
    ],
)
@pytest.mark.parametrize("max_tokens", [0, 1, 9])
@pytest.mark.parametrize("n", [1, 2])
def test_an_echo_is_streamed_once_and_first(
    http: httpx.Client, prompt: list[Any], max_tokens: int, n: int
) -> None:
    for seed in range(4):
        body = {
            "prompt": prompt,
            "max_tokens": max_tokens,
            "n": n,
            "echo": True,
            "logprobs": 2,
            "seed": seed,
            "ignore_eos": True,
        }
        expected = whole(http, "completions", body)["choices"]
        found = joined_completions(streamed(http, "completions", body), len(prompt) * n)
        assert found == expected
        for choice in found:
            given = prompt[choice["index"] // n]
            if isinstance(given, str):
                assert choice["text"].startswith(given)
            # The first token has nothing before it that could make it likely.
            nothing = [value is None for value in choice["logprobs"]["token_logprobs"]]
            assert nothing == [True] + [False] * (len(nothing) - 1)


@pytest.mark.parametrize("includes_usage", [True, False])
@pytest.mark.parametrize("n", [1, 3])
def test_a_chat_is_streamed_with_its_logprobs_and_usage(
    http: httpx.Client, n: int, includes_usage: bool
) -> None:
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": "Hi"}],
        "n": n,
        "max_tokens": 20,
        "seed": 7,
        "logprobs": True,
        "top_logprobs": 2,
        "ignore_eos": True,
    }
    expected = whole(http, "chat/completions", body)
    if includes_usage:
        body["stream_options"] = {"include_usage": True}
    chunks = streamed(http, "chat/completions", body)
    if includes_usage:
        last = chunks.pop()
        assert (last["choices"], last["usage"]) == ([], expected["usage"])
        assert all(chunk["usage"] is None for chunk in chunks)
    else:
        assert not any("usage" in chunk for chunk in chunks)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}

    speakers: dict[int, str] = {}
    found: list[dict[str, Any]] = [
        {"content": "", "logprobs": [], "finish_reason": None} for _ in range(n)
    ]
    for chunk in chunks:
        (each,) = chunk["choices"]
        index, delta = each["index"], each["delta"]
        choice = found[index]
        assert choice["finish_reason"] is None, "something came after the end"
        # Who speaks is said first, and once.
        if index not in speakers:
            speakers[index] = delta.pop("role")
        assert "role" not in delta
        choice["content"] += delta.get("content", "")
        choice["logprobs"] += (each["logprobs"] or {"content": []})["content"]
        choice["finish_reason"] = each["finish_reason"]
    assert speakers == dict.fromkeys(range(n), "assistant")
    assert found == [
        {
            "content": choice["message"]["content"],
            "logprobs": choice["logprobs"]["content"],
            "finish_reason": choice["finish_reason"],
        }
        for choice in expected["choices"]
    ]
    assert [len(choice["logprobs"]) for choice in found] == [20] * n
    assert all(len(token["top_logprobs"]) == 2 for token in found[0]["logprobs"])
    assert len({choice["content"] for choice in found}) == n
