"""The gateway in front of two completion servers, as a client of OpenAI sees it."""

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from pipeline.stack.gateway import create_app
from serving.swap_schemas import request_swap
from serving.weights import release_store
from tests.echo_engine import EchoEngine
from tests.jobs_fixtures import until
from tests.ports import free_port
from tests.serving_fixtures import ADMIN_TOKEN, CHAT_TEMPLATE, echo_app, echo_release, running

KEY = "k3y"
MAX_BODY_BYTES = 200_000


@dataclass
class Server:
    name: str
    folder: Path
    engine: EchoEngine
    releases: list[str]
    url: str = ""

    def post(self, url: str, **fields: Any) -> httpx.Response:
        body = {"model": self.name, "prompt": "Hello", "max_tokens": 4, **fields}
        return httpx.post(f"{url}/v1/completions", json=body, headers=AUTHORIZED)


AUTHORIZED = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[Server]]:
    """Two servers with a key, each with a live release and one to swap in."""
    with contextlib.ExitStack() as stack:
        found = []
        for number, name in enumerate(("faq", "notes")):
            folder = tmp_path / name
            ids = [
                echo_release(folder, 10 * number + seed, chat_template=CHAT_TEMPLATE).id
                for seed in (1, 2)
            ]
            release_store.set_current(folder, ids[0])
            server = Server(name, folder, EchoEngine(step_seconds=0.005), ids)
            settings = {"api_key": KEY, "max_queue": 2, "drain_seconds": 1}
            app = echo_app(folder, server.engine, pipeline=name, **settings)
            server.url = stack.enter_context(running(app))
            found.append(server)
        yield found


@pytest.fixture
def url(servers: list[Server]) -> Iterator[str]:
    urls = {server.name: server.url for server in servers}
    with running(create_app(urls, max_body_bytes=MAX_BODY_BYTES)) as url:  # type: ignore[arg-type]
        yield url


@pytest.fixture
def client_of() -> Iterator[Callable[..., openai.OpenAI]]:
    """Makes clients, and closes them after the test."""
    with contextlib.ExitStack() as clients:

        def client(url: str, key: str = KEY) -> openai.OpenAI:
            made = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
            return clients.enter_context(made)

        yield client


def test_model_chooses_the_pipeline(
    url: str, servers: list[Server], client_of: Callable[..., openai.OpenAI]
) -> None:
    client = client_of(url)
    assert {model.id for model in client.models.list()} == {"faq", "notes"}
    for server in servers:
        assert client.models.retrieve(server.name).id == server.name
        for model in (server.name, server.releases[0]):
            done = client.completions.create(model=model, prompt="Hello", max_tokens=4)
            assert done.model == model
            said = client.chat.completions.create(
                model=model, messages=[{"role": "user", "content": "Hello"}], max_tokens=4
            )
            assert said.choices[0].message.content
        through, direct = server.post(url), server.post(server.url)
        names = ("x-model-release", "x-dataset-revision", "x-job-id", "content-type")
        assert [through.headers[name] for name in names] == [direct.headers[name] for name in names]
        assert through.json()["choices"] == direct.json()["choices"]
        for name in ("date", "server", "content-length"):
            assert len(through.headers.get_list(name)) == 1, name
    # Also a body that is large enough for a thread.
    many = {"model": "notes", "prompt": "x " * 50_000}
    answer = httpx.post(f"{url}/v1/completions", json=many, headers=AUTHORIZED)
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert httpx.get(f"{url}/docs").text == httpx.get(f"{servers[0].url}/docs").text


def test_who_is_refused_and_why(
    url: str, servers: list[Server], client_of: Callable[..., openai.OpenAI]
) -> None:
    client = client_of(url)
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="gpt", prompt="Hello")
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    assert "faq, notes" in str(unknown.value)
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt")
    for body in ({"prompt": "Hello"}, {"prompt": "Hello", "model": None}, ["Hello"]):
        answer = httpx.post(f"{url}/v1/completions", json=body, headers=AUTHORIZED)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "model"
        assert "must name one of them: faq, notes" in answer.json()["error"]["message"]
    answer = httpx.post(f"{url}/v1/completions", content=b"{", headers=AUTHORIZED)
    assert answer.status_code == 400 and "not JSON" in answer.json()["error"]["message"]
    large = {"model": "faq", "prompt": "x" * MAX_BODY_BYTES}
    answer = httpx.post(f"{url}/v1/completions", json=large, headers=AUTHORIZED)
    assert answer.status_code == 413 and "larger than" in answer.json()["error"]["message"]
    # A stranger learns no name.
    stranger = client_of(url, "wrong")
    for model in ("faq", "gpt"):
        with pytest.raises(openai.AuthenticationError) as refused:
            stranger.completions.create(model=model, prompt="Hello")
        assert refused.value.code == "invalid_token" and "notes" not in str(refused.value)
    with pytest.raises(openai.AuthenticationError):
        stranger.models.list()
    # What a server refuses comes as the server says it.
    for asked in (url, servers[0].url):
        answer = servers[0].post(asked, max_tokens=-1)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "max_tokens")


def test_a_swap_in_one_while_the_other_streams(
    url: str, servers: list[Server], client_of: Callable[..., openai.OpenAI]
) -> None:
    streaming, swapped = servers
    client = client_of(url)
    stream = client.completions.create(
        model=streaming.name,
        prompt="Hello",
        max_tokens=100,
        stream=True,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    first = next(stream)
    assert swapped.post(url).headers["x-model-release"] == swapped.releases[0]
    result = request_swap(swapped.url, swapped.releases[1], token=ADMIN_TOKEN)
    assert result.result == "live"
    assert swapped.post(url).headers["x-model-release"] == swapped.releases[1]
    assert sum(streaming.engine.num_running.values()) == 1, "pieces come as they are made"
    pieces = [first, *stream]
    assert {piece.system_fingerprint for piece in pieces} == {first.system_fingerprint}
    assert pieces[-1].choices[0].finish_reason == "length"
    whole = streaming.post(url, max_tokens=100, temperature=0, ignore_eos=True)
    text = "".join(piece.choices[0].text for piece in pieces)
    assert text == whole.json()["choices"][0]["text"]


def test_a_client_that_leaves_ends_its_request(url: str, servers: list[Server]) -> None:
    server = servers[1]
    server.engine.step_seconds = 0.5
    fields = {"max_tokens": 100, "ignore_eos": True}
    body = {"model": server.name, "prompt": "Hello", "stream": True, **fields}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, headers=AUTHORIZED) as answer:
        assert answer.status_code == 200
        until(lambda: sum(server.engine.num_running.values()) == 1)
    until(lambda: sum(server.engine.num_running.values()) == 0)
    # Before the answer has begun.
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{url}/v1/completions", json={**body, "stream": False}, headers=AUTHORIZED, timeout=1
        )
    until(lambda: sum(server.engine.num_running.values()) == 0)


def test_what_a_busy_and_a_stopped_server_answer(
    servers: list[Server], client_of: Callable[..., openai.OpenAI]
) -> None:
    faq, notes = servers
    urls = {"faq": faq.url, "notes": f"http://127.0.0.1:{free_port()}"}
    with running(create_app(urls, max_body_bytes=MAX_BODY_BYTES)) as url:  # type: ignore[arg-type]
        answer = notes.post(url)
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
        assert answer.json()["error"]["code"] == "unreachable"
        assert notes.post(url, model=notes.releases[0]).status_code == 503, "may be its release"
        assert faq.post(url).status_code == 200
        assert [model.id for model in client_of(url).models.list()] == ["faq"]
        health = httpx.get(f"{url}/health")
        assert (health.status_code, health.json()["status"]) == (200, "partly")
        assert health.json()["pipelines"]["notes"] == {"status": "down"}
        assert health.json()["pipelines"]["faq"]["release"] == faq.releases[0]

        faq.engine.step_seconds = 1
        with contextlib.ExitStack() as stack:
            body = {"model": "faq", "prompt": "x", "max_tokens": 50, "stream": True}
            for _ in range(2):
                stack.enter_context(
                    httpx.stream("POST", f"{url}/v1/completions", json=body, headers=AUTHORIZED)
                )
            for asked in (faq.url, url):
                full = faq.post(asked)
                assert full.status_code in (429, 503) and "Retry-After" in full.headers


def test_health_of_all_and_where_the_metrics_are(url: str, servers: list[Server]) -> None:
    health = httpx.get(f"{url}/health").json()
    assert health["status"] == "ok" and set(health["pipelines"]) == {"faq", "notes"}
    assert httpx.get(f"{url}/live").json() == {"status": "ok"}
    assert httpx.get(f"{url}/metrics").status_code == 404
    assert "vllm:num_requests_running" in httpx.get(f"{servers[1].url}/metrics").text


def test_without_a_key_a_page_of_another_name_gets_nothing(tmp_path: Path) -> None:
    """DNS rebinding: the header `Host` reaches the server, which refuses it."""
    echo_release(tmp_path / "faq", 1)
    with running(echo_app(tmp_path / "faq", pipeline="faq")) as server:
        gateway = create_app({"faq": server, "other": server}, max_body_bytes=MAX_BODY_BYTES)
        with running(gateway) as url:  # type: ignore[arg-type]
            evil = {"Host": "evil.example"}
            for path in ("/v1/models", "/health", "/docs", "/v1/models/faq"):
                assert httpx.get(f"{url}{path}", headers=evil).status_code == 403, path
            body = json.dumps({"model": "faq", "prompt": "Hello"})
            answer = httpx.post(f"{url}/v1/completions", content=body, headers=evil)
            assert answer.status_code == 403
            assert httpx.post(f"{url}/v1/completions", content=body).status_code == 400, "no type"
