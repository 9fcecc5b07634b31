"""What `/v1` refuses, how it says so, and what it does without a release, key or template."""

from pathlib import Path

import httpx
import openai
import pytest

from serving.weights.release_store import set_current
from tests.completions_fixtures import Server, server
from tests.contract.engine_bench import swap
from tests.echo_engine import EchoEngine
from tests.serving_fixtures import echo_app, echo_release, running

__all__ = ["server"]


GOOD = {"model": "answers", "prompt": "Hello", "max_tokens": 4}
UNSUPPORTED: dict[str, object] = {
    "response_format": {"type": "json_object"},
    "structured_outputs": {"regex": "a"},
    "allowed_token_ids": [1],
}
"""What the engine refuses when it gets the generation."""
NOT_SUPPORTED = "not supported by the engine echo; leave it out"


@pytest.mark.parametrize(
    ("change", "status", "param", "said"),
    [
        ({"model": "other"}, 404, "model", "'other'"),
        ({"temperature": -1}, 400, "temperature", "greater than or equal to 0, got -1"),
        ({"prompt": ""}, 400, "prompt", "empty"),
        ({"prompt": ["a", 1]}, 400, "prompt", "list"),
        ({"prompt": [257]}, 400, "prompt", "257"),
        ({"prompt": "a<image>"}, 400, "prompt", "token id 257 is not below 257"),
        ({"prompt": None}, 400, "prompt", "string"),
        ({"n": 17}, 400, "n", "more than 16 sequences"),
        ({"prompt": ["a"] * 17}, 400, "prompt", "more than 16 sequences"),
        ({"max_tokens": 4.5}, 400, "max_tokens", "integer"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            400,
            "response_format",
            "needs json_schema.schema",
        ),
        ({"stop": ["a"] * 1025}, 400, "stop", "1024"),
        ({"logit_bias": {"x": 1}}, 400, "logit_bias", '"x"'),
        ({"logit_bias": {"999": 1}}, 400, "logit_bias", "999"),
        ({"stop_token_ids": [999]}, 400, "stop_token_ids", "999"),
        ({"suffix": "tail"}, 400, "suffix", "leave it out"),
        *(
            ({param: value, "stream": True}, 400, param, f"{param}: {NOT_SUPPORTED}")
            for param, value in UNSUPPORTED.items()
        ),
    ],
)
def test_a_wrong_field_is_named(
    server: Server, change: dict[str, object], status: int, param: str | None, said: str
) -> None:
    answer = server.post(**{**GOOD, **change})
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert said in error["message"]
    assert error["param"] == param
    assert error["code"]


def test_fields_nobody_knows_and_nulls_are_ignored(server: Server) -> None:
    plain = server.post(**GOOD, seed=1).json()["choices"]
    odd = server.post(**GOOD, seed=1, n=None, temperature=None, colour="red", suffix=None)
    assert odd.json()["choices"] == plain


@pytest.mark.parametrize(
    ("method", "path", "content", "status"),
    [
        ("POST", "/v1/completions", b"{", 400),
        ("POST", "/v1/completions", b"[]", 400),
        ("POST", "/v1/completions", b"\xff\xfe", 400),
        ("POST", "/v1/completions", b"", 400),
        ("POST", "/v1/chat/completions", b'{"messages": []}', 400),
        ("POST", "/v1/chat/completions", b'{"messages": [{"role": "tool", "content": ""}]}', 400),
        (
            "POST",
            "/v1/chat/completions",
            b'{"messages": [{"role": "user", "content": "<image>"}]}',
            400,
        ),
        ("POST", "/v1/completions", b" " * 9_000_000, 413),
        ("GET", "/v1/completions", b"", 405),
        ("GET", "/v1/nothing", b"", 404),
        ("GET", "/v1/models/other", b"", 404),
        ("POST", "/admin/swap", b"{}", 401),
    ],
)
def test_every_error_has_one_shape(
    server: Server, method: str, path: str, content: bytes, status: int
) -> None:
    headers = {"Content-Type": "application/json"}
    answer = httpx.request(method, server.url + path, content=content, headers=headers)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"].keys() == {"message", "type", "param", "code"}


@pytest.mark.parametrize("given", [None, "text/plain", "application/x-www-form-urlencoded"])
def test_what_a_browser_sends_to_other_sites_unasked_is_refused(
    server: Server, given: str | None
) -> None:
    headers = {} if given is None else {"Content-Type": given}
    content = b'{"prompt": "Hi"}'
    answer = httpx.post(f"{server.url}/v1/completions", content=content, headers=headers)
    assert answer.status_code == 400
    assert "Content-Type must be application/json" in answer.json()["error"]["message"]


def test_a_list_of_wrong_values_is_one_error(server: Server) -> None:
    body = {**GOOD, "stop_token_ids": ["x"] * 30_000, "logit_bias": {"y": 1}, "n": 0, "top_p": 9}
    error = server.post(**body).json()["error"]
    assert len(error["message"]) < 1000
    assert "stop_token_ids.0" in error["message"] and "top_p" in error["message"]
    assert error["code"] == "invalid_value"


def test_another_release_than_the_live_one_can_be_excluded(server: Server) -> None:
    for release_id, status in ((server.release.id, 200), ("r000009-00000000", 409)):
        answer = httpx.post(
            f"{server.url}/v1/completions", json=GOOD, headers={"X-Exact-Release": release_id}
        )
        assert answer.status_code == status
    assert answer.headers["x-model-release"] == server.release.id
    # OpenAI's clients send a request with the status 409 again, unless this header forbids it.
    assert answer.headers["x-should-retry"] == "false"


def test_before_the_first_release(tmp_path: Path) -> None:
    with running(echo_app(tmp_path / "answers")) as url:
        health = httpx.get(f"{url}/health")
        assert (health.status_code, health.json()) == (503, {"status": "waiting"})
        assert httpx.get(f"{url}/v1/models").json()["data"] == []
        answer = httpx.post(f"{url}/v1/completions", json=GOOD)
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["code"] == "unavailable"
        with httpx.Client(base_url=url) as http:
            result = swap(http, echo_release(tmp_path / "answers", 1).id).json()
        assert (result["result"], result["previous"]) == ("live", None)


def test_api_keys_guard_v1_alone(tmp_path: Path) -> None:
    pipeline_dir = tmp_path / "answers"
    set_current(pipeline_dir, echo_release(pipeline_dir, 1).id)
    with running(echo_app(pipeline_dir, api_key="key")) as url:
        assert httpx.get(f"{url}/health").status_code == 200
        for path in ("/v1/completions", "/v1/chat/completions"):
            assert httpx.post(url + path, json=GOOD).status_code == 401
        assert httpx.get(f"{url}/v1/models").status_code == 401
        with openai.OpenAI(base_url=f"{url}/v1", api_key="key") as client:
            client.completions.create(model="answers", prompt="Hi", max_tokens=2)


def test_a_release_without_a_chat_template_says_so(tmp_path: Path) -> None:
    pipeline_dir = tmp_path / "answers"
    set_current(pipeline_dir, echo_release(pipeline_dir, 1).id)
    with running(echo_app(pipeline_dir)) as url:
        body = {"model": "answers", "messages": [{"role": "user", "content": "Hi"}]}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "no_chat_template"


def test_an_engine_of_a_shorter_context_is_not_asked_for_more(tmp_path: Path) -> None:
    set_current(tmp_path, echo_release(tmp_path, 1).id)
    engine = EchoEngine()
    engine.context = 20
    with running(echo_app(tmp_path, engine)) as url:
        assert httpx.get(f"{url}/v1/models").json()["data"][0]["max_model_len"] == 20
        ask = {"prompt": "x" * 15, "max_tokens": 5}
        assert httpx.post(f"{url}/v1/completions", json=ask).status_code == 200
        answer = httpx.post(f"{url}/v1/completions", json=ask | {"max_tokens": 6})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["code"] == "context_length_exceeded"
        # Clients that shorten a conversation recognise the error by these words.
        said = "This model's maximum context length is 20 tokens. However, "
        assert error["message"] == (
            f"{said}you requested 21 tokens (15 in the prompt, 6 in the completion); ask for at "
            "most 5 new tokens"
        )
        for prompt in ("x" * 20, "x" * 10_000, [1] * 21):
            body = {"prompt": prompt, "max_tokens": 1}
            error = httpx.post(f"{url}/v1/completions", json=body).json()["error"]
            assert error["code"] == "context_length_exceeded"
            assert error["message"].startswith(f"{said}your prompt has {len(prompt)} ")
