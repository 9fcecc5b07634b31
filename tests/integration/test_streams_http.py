"""What is streamed, put together, is what is answered whole."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from serving.weights.release_store import set_current
from tests.serving_fixtures import CHAT_TEMPLATE, EOS, echo_app, echo_release, running


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    pipeline_dir = tmp_path_factory.mktemp("home") / "answers"
    set_current(pipeline_dir, echo_release(pipeline_dir, 1, chat_template=CHAT_TEMPLATE).id)
    with running(echo_app(pipeline_dir)) as url, httpx.Client(base_url=url) as client:
        yield client


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
