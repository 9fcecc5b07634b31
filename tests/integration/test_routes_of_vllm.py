"""What stands around all routes."""

import re
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from serving.tokenizer import ReleaseTokenizer
from serving.weights.release_store import set_current
from tests.serving_fixtures import (
    CHAT_TEMPLATE,
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
