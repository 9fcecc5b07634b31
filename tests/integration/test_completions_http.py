"""`/v1` over the wire, with the clients that people use."""

from pathlib import Path

import httpx
import pytest

from serving.weights.release_store import set_current
from tests.completions_fixtures import Server, server
from tests.serving_fixtures import CHAT_TEMPLATE, byte_tokenizer, echo_app, echo_release, running

__all__ = ["server"]


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


@pytest.mark.parametrize(
    ("rows", "of_chat", "of_completion"),
    [
        (("prompt", "text"), "prompt, text", None),
        (("text",), "text", None),
        (("messages",), None, "messages"),
        (("messages", "prompt"), None, None),
        ((), None, None),  # nobody knows
    ],
)
def test_an_answer_says_that_no_such_prompt_was_trained(
    rows: tuple[str, ...],
    of_chat: str | None,
    of_completion: str | None,
    tmp_path: Path,
) -> None:
    release = echo_release(tmp_path, 1, chat_template=CHAT_TEMPLATE, rows=rows)
    set_current(tmp_path, release.id)
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    with running(echo_app(tmp_path)) as url, httpx.Client(base_url=url) as http:
        for body in (chat, {**chat, "stream": True}):
            answer = http.post("/v1/chat/completions", json=body)
            assert (answer.status_code, answer.headers.get("x-trained-on")) == (200, of_chat)
        answer = http.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 1})
        assert answer.headers.get("x-trained-on") == of_completion


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
    from tests.echo_engine import digests_of, echo_logprobs

    text = "Grüße, 世界"
    ids = byte_tokenizer().encode(text).ids
    (choice,) = server.post(
        model="answers", prompt=text, max_tokens=max_tokens, echo=True, logprobs=1, temperature=0
    ).json()["choices"]
    assert choice["text"].startswith(text)
    logprobs = choice["logprobs"]
    assert len(logprobs["tokens"]) == len(ids) + max_tokens
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    told = echo_logprobs(digests_of(server.release), ids)
    assert logprobs["token_logprobs"][1 : len(ids)] == list(told)
    assert logprobs["text_offset"][: len(ids)][-1] == len(text) - 1
    assert all(len(top) >= 1 for top in logprobs["top_logprobs"][1:])


def test_every_choice_has_the_logprobs_of_its_prompt(server: Server) -> None:
    prompts = ["Hello", "Grüße"]
    common = {"model": "answers", "prompt": prompts, "max_tokens": 2, "echo": True, "logprobs": 1}
    one = server.post(**common).json()["choices"]
    choices = server.post(n=2, **common).json()["choices"]
    for choice, wanted in zip(choices, (one[0], one[0], one[1], one[1]), strict=True):
        length = len(wanted["logprobs"]["tokens"]) - 2
        found = choice["logprobs"]["token_logprobs"][:length]
        assert found == wanted["logprobs"]["token_logprobs"][:length]


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


def test_models_say_what_is_live(server: Server) -> None:
    (model,) = server.client.models.list()
    extra = model.model_extra or {}
    assert model.id == "answers"
    assert extra["release"] == server.release.id
    assert extra["dataset_revision"] == f"{1:040x}"
    assert Path(extra["root"]).name == server.release.id
    assert server.client.models.retrieve("answers").id == "answers"
    assert server.client.models.retrieve(server.release.id).id == "answers"
