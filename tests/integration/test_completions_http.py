"""`/v1` over the wire, with the clients that people use."""

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest
from tokenizers import AddedToken

from serving.engines.echo_engine import EchoEngine
from serving.weights.release import Release
from serving.weights.releases import set_current
from tests.serving_fixtures import (
    ADMIN_TOKEN,
    CHAT_TEMPLATE,
    byte_tokenizer,
    echo_app,
    echo_release,
    running,
)


@dataclass
class Server:
    url: str
    release: Release
    client: openai.OpenAI
    engine: EchoEngine

    def post(self, **body: object) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/completions", json=body)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    pipeline_dir = tmp_path_factory.mktemp("home") / "answers"
    tokenizer = byte_tokenizer()
    # The network has no such token.
    tokenizer.add_special_tokens([AddedToken("<image>", special=True)])
    release = echo_release(pipeline_dir, 1, chat_template=CHAT_TEMPLATE, tokenizer=tokenizer)
    set_current(pipeline_dir, release.id)
    engine = EchoEngine()
    with (
        running(echo_app(pipeline_dir, engine, max_sequences=16)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield Server(url, release, client, engine)


def test_a_whole_completion_names_where_it_comes_from(server: Server) -> None:
    raw = server.client.completions.with_raw_response.create(
        model="answers", prompt="Hello", max_tokens=8, temperature=0
    )
    assert raw.headers["x-model-release"] == server.release.id
    assert raw.headers["x-dataset-revision"] == f"{1:040x}"
    assert raw.headers["x-job-id"] == "job-1"
    completion = raw.parse()
    assert completion.system_fingerprint == server.release.id
    assert completion.object == "text_completion"
    assert completion.usage is not None
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (5, 8)
    assert completion.choices[0].finish_reason == "length"


def test_curl_as_in_the_specification(server: Server) -> None:
    body = {"model": "answers", "prompt": "Once", "max_tokens": 4, "temperature": 0}
    done = subprocess.run(
        [
            "curl",
            "-sS",
            f"{server.url}/v1/completions",
            "-H",
            "Content-Type: application/json",
            "-d",
            json.dumps(body),
        ],
        capture_output=True,
        check=True,
        text=True,
    )
    assert json.loads(done.stdout)["choices"][0]["index"] == 0


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_says_what_the_whole_says(server: Server, n: int) -> None:
    asked = {"model": "answers", "prompt": ["Hello", "World"], "max_tokens": 40, "n": n}
    common = {**asked, "temperature": 1, "seed": 7, "logprobs": 2, "ignore_eos": True}
    whole = server.post(**common).json()
    texts = [""] * 2 * n
    reasons: list[str | None] = [None] * 2 * n
    tokens: list[list[str]] = [[] for _ in texts]
    offsets: list[list[int]] = [[] for _ in texts]
    usage = None
    stream = server.client.completions.create(
        model="answers",
        prompt=["Hello", "World"],
        max_tokens=40,
        n=n,
        temperature=1,
        seed=7,
        logprobs=2,
        extra_body={"ignore_eos": True},
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        assert chunk.system_fingerprint == server.release.id
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
            assert choice.logprobs is not None
            tokens[choice.index] += choice.logprobs.tokens or []
            offsets[choice.index] += choice.logprobs.text_offset or []
    assert texts == [choice["text"] for choice in whole["choices"]]
    assert reasons == [choice["finish_reason"] for choice in whole["choices"]]
    assert tokens == [choice["logprobs"]["tokens"] for choice in whole["choices"]]
    assert offsets == [choice["logprobs"]["text_offset"] for choice in whole["choices"]]
    assert [len(each) for each in tokens] == [40] * 2 * n
    assert usage is not None and usage.model_dump(exclude_none=True) == whole["usage"]
    if n > 1:
        assert texts[0] != texts[1]


def test_prompts_in_all_four_forms_are_the_same(server: Server) -> None:
    ids = byte_tokenizer().encode("Hello").ids
    common = {"model": "answers", "max_tokens": 8, "temperature": 0}
    one = server.post(prompt="Hello", **common).json()["choices"]
    assert server.post(prompt=ids, **common).json()["choices"] == one
    two = server.post(prompt=["Hello", "Hello"], **common).json()["choices"]
    assert [choice["text"] for choice in two] == [one[0]["text"]] * 2
    assert server.post(prompt=[ids, ids], **common).json()["choices"] == two


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_the_scoring_idiom(server: Server, max_tokens: int) -> None:
    from serving.engines.echo_engine import echo_logprobs

    text = "Grüße, 世界"
    ids = byte_tokenizer().encode(text).ids
    (choice,) = server.post(
        model="answers", prompt=text, max_tokens=max_tokens, echo=True, logprobs=1, temperature=0
    ).json()["choices"]
    assert choice["text"].startswith(text)
    logprobs = choice["logprobs"]
    assert len(logprobs["tokens"]) == len(ids) + max_tokens
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert logprobs["token_logprobs"][1 : len(ids)] == list(echo_logprobs(server.release, ids))
    assert logprobs["text_offset"][: len(ids)][-1] == len(text) - 1
    assert all(len(top) >= 1 for top in logprobs["top_logprobs"][1:])


def test_a_stop_string_cut_across_tokens_ends_the_text_before_it(server: Server) -> None:
    common = {"model": "answers", "prompt": "Stop", "temperature": 0, "ignore_eos": True}
    full = server.post(max_tokens=60, **common).json()["choices"][0]["text"]
    place = next(p for p in range(3, len(full) - 3) if full.find(full[p : p + 3]) == p)
    stop = full[place : place + 3]
    body = {**common, "max_tokens": 60, "stop": [stop, "never there"], "logprobs": 0}
    answer = server.post(**body).json()
    choice = answer["choices"][0]
    assert choice["text"] == full[:place]
    assert choice["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] < 60
    assert all(offset < place for offset in choice["logprobs"]["text_offset"])
    with httpx.stream("POST", f"{server.url}/v1/completions", json={**body, "stream": True}) as got:
        lines = [line[6:] for line in got.iter_lines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    chunks = [json.loads(line)["choices"][0] for line in lines]
    assert "".join(chunk["text"] for chunk in chunks) == full[:place]
    assert chunks[-1]["finish_reason"] == "stop"


def test_best_of_takes_the_likeliest(server: Server) -> None:
    common = {"model": "answers", "prompt": "Best", "max_tokens": 6, "seed": 3, "logprobs": 0}
    every = server.post(n=4, ignore_eos=True, **common).json()["choices"]
    means = {choice["text"]: sum(choice["logprobs"]["token_logprobs"]) / 6 for choice in every}
    best = server.post(n=1, best_of=4, ignore_eos=True, **common).json()
    assert best["choices"][0]["text"] == max(means, key=lambda text: means[text])
    assert best["usage"]["completion_tokens"] == 24


def test_chat_follows_the_template_of_the_tokenizer(server: Server) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    chat = server.client.chat.completions.create(
        model="answers",
        messages=messages,
        max_tokens=9,
        temperature=0,
        logprobs=True,  # type: ignore[arg-type]
    )
    plain = server.client.completions.create(
        model="answers", prompt="user: Hi\nassistant: ", max_tokens=9, temperature=0
    )
    assert chat.choices[0].message.content == plain.choices[0].text
    assert chat.system_fingerprint == server.release.id
    assert chat.choices[0].logprobs is not None
    assert len(chat.choices[0].logprobs.content or []) == 9
    stream = server.client.chat.completions.create(
        model="answers",
        messages=messages,
        max_tokens=9,
        temperature=0,
        stream=True,  # type: ignore[arg-type]
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == plain.choices[0].text


def test_models_say_what_is_live(server: Server) -> None:
    (model,) = server.client.models.list()
    extra = model.model_extra or {}
    assert model.id == "answers"
    assert extra["release"] == server.release.id
    assert extra["dataset_revision"] == f"{1:040x}"
    assert Path(extra["root"]).name == server.release.id
    assert extra["previous"] is None
    assert server.client.models.retrieve("answers").id == "answers"
    assert server.client.models.retrieve(server.release.id).id == "answers"


def test_metrics_count_requests_and_tokens(server: Server) -> None:
    server.post(model="answers", prompt="Count", max_tokens=3, temperature=0, ignore_eos=True)
    text = httpx.get(f"{server.url}/metrics").text
    assert f'serving_generated_tokens_total{{release="{server.release.id}"}}' in text
    assert 'serving_requests_total{route="/v1/completions",status="200"}' in text
    assert "serving_requests_in_flight 0.0" in text
    assert f'serving_release_live{{release="{server.release.id}"}} 1.0' in text


GOOD = {"model": "answers", "prompt": "Hello", "max_tokens": 4}


@pytest.mark.parametrize(
    ("change", "status", "param", "said"),
    [
        ({"model": "other"}, 404, "model", "'other'"),
        ({"temperature": -1}, 400, "temperature", "greater than or equal to 0, got -1"),
        ({"temperature": "hot"}, 400, "temperature", "number"),
        ({"max_tokens": -1}, 400, "max_tokens", "0"),
        ({"max_tokens": "4"}, 400, "max_tokens", "integer"),
        ({"max_tokens": 124}, 400, "max_tokens", "128 tokens: 5 of the prompt and 124"),
        ({"prompt": "x" * 500}, 400, "prompt", "500 tokens, and the context 128"),
        ({"prompt": ""}, 400, "prompt", "empty"),
        ({"prompt": []}, 400, "prompt", "list"),
        ({"prompt": ["a", 1]}, 400, "prompt", "list"),
        ({"prompt": [[]]}, 400, "prompt", "list"),
        ({"prompt": [1, -1]}, 400, "prompt", "list"),
        ({"prompt": [True]}, 400, "prompt", "list"),
        ({"prompt": [257]}, 400, "prompt", "257"),
        ({"prompt": "a<image>"}, 400, "prompt", "token id 257 is not below 257"),
        ({"prompt": None}, 400, "prompt", "string"),
        ({"n": 0}, 400, "n", "1"),
        ({"n": 17}, 400, "n", "more than 16 sequences"),
        ({"best_of": 17}, 400, "best_of", "more than 16 sequences"),
        ({"prompt": ["a"] * 17}, 400, "prompt", "more than 16 sequences"),
        ({"n": 3, "best_of": 2}, 400, "best_of", "less than n, which is 3, got 2"),
        ({"best_of": 2, "stream": True}, 400, "best_of", "cannot be streamed"),
        ({"top_p": 0}, 400, "top_p", "greater than 0"),
        ({"logprobs": 21}, 400, "logprobs", "20"),
        ({"stop": [""]}, 400, "stop", "empty"),
        ({"stop": ["a"] * 17}, 400, "stop", "16"),
        ({"logit_bias": {"x": 1}}, 400, "logit_bias", "'x'"),
        ({"logit_bias": {"5": 101}}, 400, "logit_bias", "100"),
        ({"logit_bias": {"999": 1}}, 400, "logit_bias", "999"),
        ({"stop_token_ids": [999]}, 400, "stop_token_ids", "999"),
        ({"suffix": "tail"}, 400, "suffix", "leave it out"),
        ({"stream_options": {"include_usage": True}}, 400, "stream_options", "stream: true"),
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
        ("GET", "/", b"", 404),
        ("GET", "/v1/models/other", b"", 404),
        ("POST", "/admin/swap", b"{}", 401),
    ],
)
def test_every_error_has_one_shape(
    server: Server, method: str, path: str, content: bytes, status: int
) -> None:
    answer = httpx.request(method, server.url + path, content=content)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"].keys() == {"message", "type", "param", "code"}


def test_another_release_than_the_live_one_can_be_excluded(server: Server) -> None:
    for release_id, status in ((server.release.id, 200), ("r000009-00000000", 409)):
        answer = httpx.post(
            f"{server.url}/v1/completions", json=GOOD, headers={"X-Exact-Release": release_id}
        )
        assert answer.status_code == status
    assert answer.headers["x-model-release"] == server.release.id


def test_only_the_admin_token_swaps(server: Server) -> None:
    body = {"release": server.release.id}
    url = f"{server.url}/admin/swap"
    assert httpx.post(url, json=body, headers={"Authorization": "Bearer no"}).status_code == 403
    good = {"Authorization": f"Bearer {ADMIN_TOKEN}"}
    assert httpx.post(url, json=body, headers=good).json()["result"] == "live"
    assert httpx.post(url, json={"relase": "x"}, headers=good).status_code == 400


def test_before_the_first_release(tmp_path: Path) -> None:
    with running(echo_app(tmp_path / "answers")) as url:
        health = httpx.get(f"{url}/health")
        assert (health.status_code, health.json()) == (503, {"status": "waiting"})
        assert httpx.get(f"{url}/v1/models").json()["data"] == []
        answer = httpx.post(f"{url}/v1/completions", json=GOOD)
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["code"] == "unavailable"


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
        assert answer.json()["error"]["code"] == "context_length_exceeded"
