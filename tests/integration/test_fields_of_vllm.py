"""Fields that vLLM has besides OpenAI's change the answer as they do there."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from serving.weights.release_store import set_current
from tests.scripted_engine import ScriptedEngine
from tests.serving_fixtures import EOS, byte_tokenizer, echo_app, echo_release, running

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% if not loop.last or add_generation_prompt %};{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
    "{% if mood %}[{{ mood }}]{% endif %}{% if reasoning_effort %}{{ reasoning_effort }}{% endif %}"
    "{% if enable_thinking is defined %}, thinks: {{ enable_thinking }}{% endif %}"
)
MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]


class Server:
    def __init__(self, http: httpx.Client, engine: ScriptedEngine) -> None:
        self.http, self.engine = http, engine

    def answer(self, text: str, **body: Any) -> dict[str, Any]:
        """The choice of an answer that the engine gives as `text`."""
        self.engine.texts = [text]
        route = "chat/completions" if "messages" in body else "completions"
        answer = self.http.post(f"/v1/{route}", json={"max_tokens": 40, **body})
        assert answer.status_code == 200, answer.text
        choice: dict[str, Any] = answer.json()["choices"][0]
        return choice

    @property
    def prompt(self) -> str:
        text: str = byte_tokenizer().decode(list(self.engine.told[-1].prompt))
        return text


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    pipeline_dir = tmp_path_factory.mktemp("home") / "answers"
    set_current(pipeline_dir, echo_release(pipeline_dir, 1, chat_template=TEMPLATE).id)
    engine = ScriptedEngine()
    with running(echo_app(pipeline_dir, engine)) as url, httpx.Client(base_url=url) as http:
        yield Server(http, engine)


@pytest.mark.parametrize(
    ("body", "text", "stop_reason"),
    [
        ({}, "one two", None),
        ({"stop": ["wt", " tw", "zz"]}, "one", " tw"),
        ({"stop": [*(f"z{number}" for number in range(40)), " tw"]}, "one", " tw"),
        ({"stop": " tw", "include_stop_str_in_output": True}, "one tw", " tw"),
        ({"stop_token_ids": [ord(" ") - 1 + 189]}, "one", 220),
        (
            {"stop_token_ids": [220], "include_stop_str_in_output": True},
            "one ",
            220,
        ),
        ({"max_tokens": 3, "stop": ["two"]}, "one", None),
    ],
)
@pytest.mark.parametrize("prompt", [{"prompt": "Hi"}, {"messages": MESSAGES}])
def test_what_ended_an_answer_is_told(
    server: Server, prompt: dict[str, Any], body: dict[str, Any], text: str, stop_reason: object
) -> None:
    choice = server.answer("one two", **prompt, **body)
    assert choice.get("text", choice.get("message", {}).get("content")) == text
    assert choice["stop_reason"] == stop_reason
    assert choice["finish_reason"] == ("length" if "max_tokens" in body else "stop")


def test_special_tokens_are_shown_to_who_wants_them(server: Server) -> None:
    body = {"prompt": "Hi", "ignore_eos": True}
    assert server.answer("a<eos>b", **body)["text"] == "ab"
    shown = server.answer("a<eos>b", skip_special_tokens=False, **body)
    # The last one ends the answer.
    assert shown["text"] == "a<eos>b<eos>"


@pytest.mark.parametrize(
    ("body", "prompt"),
    [
        ({}, "<user>Hi;<assistant>Ho;<assistant>"),
        ({"chat_template_kwargs": {"mood": "gay"}}, "<user>Hi;<assistant>Ho;<assistant>[gay]"),
        (
            {"reasoning_effort": "low"},
            "<user>Hi;<assistant>Ho;<assistant>low, thinks: True",
        ),
        (
            {"reasoning_effort": "none"},
            "<user>Hi;<assistant>Ho;<assistant>none, thinks: False",
        ),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}},
            "<user>Hi;<assistant>Ho;<assistant>low, thinks: False",
        ),
        ({"chat_template_kwargs": {"self": 1}}, "<user>Hi;<assistant>Ho;<assistant>"),
    ],
)
def test_how_the_template_is_rendered_is_asked_for(
    server: Server, body: dict[str, Any], prompt: str
) -> None:
    server.answer("!", messages=MESSAGES, **body)
    assert server.prompt == prompt


def test_parts_of_a_message_are_lines_for_a_template_that_takes_texts(server: Server) -> None:
    parts = [{"type": "text", "text": "Hi"}, {"type": "refusal", "refusal": "No"}]
    server.answer("!", messages=[{"role": "user", "content": parts}])
    assert server.prompt == "<user>Hi\nNo;<assistant>"


def test_special_tokens_are_put_before_a_prompt_unless_not_wanted(tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = byte_tokenizer()
    tokenizer.post_processor = TemplateProcessing(
        single="<eos> $A", special_tokens=[("<eos>", EOS)]
    )
    set_current(tmp_path, echo_release(tmp_path, 1, chat_template=TEMPLATE, tokenizer=tokenizer).id)
    engine = ScriptedEngine()
    with running(echo_app(tmp_path, engine)) as url, httpx.Client(base_url=url) as http:
        server = Server(http, engine)
        for body, number in (
            ({"prompt": "Hi"}, 3),
            ({"prompt": "Hi", "add_special_tokens": False}, 2),
            ({"messages": MESSAGES[:1]}, 20),
            ({"messages": MESSAGES[:1], "add_special_tokens": True}, 21),
        ):
            server.answer("!", **body)
            assert len(engine.told[-1].prompt) == number, body


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"bad_words": ["no"]}, "bad_words"),
        ({"priority": 1}, "priority"),
        (
            {"stream": True, "stream_options": {"continuous_usage_stats": True}},
            "continuous_usage_stats",
        ),
    ],
)
@pytest.mark.parametrize("prompt", [{"prompt": "Hi"}, {"messages": MESSAGES}])
def test_fields_that_are_not_supported_are_named(
    server: Server, prompt: dict[str, Any], body: dict[str, Any], param: str
) -> None:
    route = "chat/completions" if "messages" in prompt else "completions"
    answer = server.http.post(f"/v1/{route}", json={**prompt, **body})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param and "not supported here; leave it" in error["message"]


def test_defaults_that_clients_send_change_nothing(server: Server) -> None:
    defaults = {
        "model": "",
        "max_tokens": 40.0,
        "bad_words": [],
        "use_beam_search": False,
        "priority": 0,
        "length_penalty": 1.0,
        "truncate_prompt_tokens": None,
        "spaces_between_special_tokens": True,
        "best_of": None,
        "skip_special_tokens": None,
        "store": False,
        "service_tier": "auto",
    }
    plain = server.answer("yes", prompt="Hi", **defaults, logprobs=False)
    assert (plain["text"], plain["logprobs"]) == ("yes", None)
    chat = {
        "add_generation_prompt": True,
        "top_logprobs": 0,
        "modalities": ["text"],
        "functions": [],
        "verbosity": "medium",
        "tools": [],
    }
    choice = server.answer("yes", messages=MESSAGES, **defaults, **chat)
    assert choice["message"] == {"role": "assistant", "content": "yes"}
