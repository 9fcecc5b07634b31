"""The routes that vLLM has besides OpenAI's, and what stands around all routes."""

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
    byte_tokenizer,
    echo_app,
    echo_release,
    running,
)

MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    pipeline_dir = tmp_path_factory.mktemp("home") / "answers"
    set_current(pipeline_dir, echo_release(pipeline_dir, 1, chat_template=CHAT_TEMPLATE).id)
    with running(echo_app(pipeline_dir)) as url, httpx.Client(base_url=url) as client:
        yield client


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"prompt": "Grüße"}, "Grüße"),
        ({"prompt": "", "model": "", "truncate_prompt_tokens": None}, ""),
        ({"messages": MESSAGES, "chat_template": None, "functions": []}, "user: Hi\nassistant: "),
        ({"messages": MESSAGES, "add_generation_prompt": False, "model": "answers"}, "user: Hi\n"),
    ],
)
def test_what_is_tokenized_is_detokenized(
    http: httpx.Client, body: dict[str, Any], text: str
) -> None:
    ids = byte_tokenizer().encode(text).ids
    answer = http.post("/tokenize", json={**body, "return_token_strs": True}).json()
    names = [byte_tokenizer().id_to_token(each) for each in ids]
    assert answer == {
        "count": len(ids),
        "max_model_len": 128,
        "tokens": ids,
        "token_strs": names,
    }
    assert http.post("/tokenize", json=body).json()["token_strs"] is None
    assert http.post("/detokenize", json={"tokens": ids}).json() == {"prompt": text}


def test_special_tokens_are_detokenized(http: httpx.Client) -> None:
    assert http.post("/detokenize", json={"tokens": [EOS]}).json() == {"prompt": "<eos>"}


@pytest.mark.parametrize(
    ("route", "body", "status", "param"),
    [
        ("tokenize", {"prompt": 1}, 400, "prompt"),
        ("tokenize", {}, 400, "prompt"),
        ("tokenize", {"messages": []}, 400, "prompt"),
        ("tokenize", {"messages": [{"role": "tool", "content": ""}]}, 400, "messages"),
        ("tokenize", {"prompt": "Hi", "model": "other"}, 404, "model"),
        ("tokenize", {"prompt": "Hi", "truncate_prompt_tokens": 1}, 400, "truncate_prompt_tokens"),
        ("tokenize", {"messages": MESSAGES, "chat_template": "x"}, 400, "chat_template"),
        ("tokenize", {"messages": MESSAGES, "functions": [{}]}, 400, "functions"),
        (
            "tokenize",
            {"messages": MESSAGES, "mm_processor_kwargs": {"a": 1}},
            400,
            "mm_processor_kwargs",
        ),
        ("detokenize", {"tokens": [257]}, 400, "tokens"),
        ("detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("detokenize", {}, 400, "tokens"),
    ],
)
def test_what_cannot_be_tokenized_is_named(
    http: httpx.Client, route: str, body: dict[str, Any], status: int, param: str
) -> None:
    answer = http.post(f"/{route}", json=body)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["param"] == param


def test_version_and_the_head_of_health(http: httpx.Client) -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", http.get("/version").json()["version"])
    health = http.head("/health")
    assert (health.status_code, health.content) == (200, b"")


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_keeps_its_id(http: httpx.Client, stream: bool) -> None:
    body = {"prompt": "Hi", "max_tokens": 1, "stream": stream}
    mine = http.post("/v1/completions", json=body, headers={"X-Request-Id": "mine"})
    assert mine.headers["x-request-id"] == "mine" and '"cmpl-mine"' in mine.text
    own = http.post("/v1/completions", json=body)
    assert f'"cmpl-{own.headers["x-request-id"]}"' in own.text
    assert http.get("/nothing", headers={"X-Request-Id": "y"}).headers["x-request-id"] == "y"
    long = http.get("/version", headers={"X-Request-Id": "x" * 257}).headers["x-request-id"]
    assert len(long) == 32
    assert '"cmpl-body"' in http.post("/v1/completions", json={**body, "request_id": "body"}).text


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
    closed = http.get("/version", headers=page)
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
        other = httpx.get(f"{url}/version", headers={"Origin": "https://example.org"})
        assert "access-control-allow-origin" not in other.headers


# A short chat too, because its template may take long.
@pytest.mark.parametrize(
    ("route", "length"),
    [("completions", 5000), ("chat/completions", 5000), ("chat/completions", 1)],
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
