"""Tools over HTTP, through `openai`'s own client and its helpers."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from serving.weights.release_store import set_current
from tests.scripted_engine import ScriptedEngine
from tests.serving_fixtures import byte_tokenizer, echo_app, echo_release, running

TEMPLATE = """
{%- if tools %}{{ tools | tojson }} Call with <tool_call>{"name": …}</tool_call>
{% endif %}
{%- for message in messages %}{{ message.role }}: {{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>
{%- endfor %}
{% endfor %}
{%- if add_generation_prompt %}assistant: {% endif %}
"""
QUESTION = {"role": "user", "content": "Is it warm in Wien?"}
CALL = '<tool_call>\n{"name": "Weather", "arguments": {"city": "Wien"}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "Weather", "arguments": {"city": "Graz"}}\n</tool_call>'


class Weather(BaseModel):
    """The weather of a city."""

    city: str


TOOL = openai.pydantic_function_tool(Weather)


@dataclass
class Server:
    engine: ScriptedEngine
    url: str
    client: openai.OpenAI

    @property
    def prompt(self) -> str:
        """The last one."""
        text: str = byte_tokenizer().decode(list(self.engine.told[-1].prompt))
        return text


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    pipeline_dir = tmp_path_factory.mktemp("home") / "answers"
    release = echo_release(pipeline_dir, 1, chat_template=TEMPLATE, context=4096)
    set_current(pipeline_dir, release.id)
    engine = ScriptedEngine()
    with (
        running(echo_app(pipeline_dir, engine)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield Server(engine, url, client)


def ask(server: Server, *texts: str, **change: Any) -> Any:
    server.engine.texts = list(texts)
    body: Any = {"model": "answers", "messages": [QUESTION], "tools": [TOOL], **change}
    return server.client.chat.completions.create(**body)


def test_a_call_is_parsed_by_openai_s_helper(server: Server) -> None:
    server.engine.texts = ["I look. " + CALL]
    parsed = server.client.chat.completions.parse(
        model="answers",
        messages=[QUESTION],  # type: ignore[list-item]
        tools=[TOOL],
    )
    (choice,) = parsed.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look. "
    (call,) = choice.message.tool_calls or []
    assert call.function.parsed_arguments == Weather(city="Wien")
    assert '"city"' in server.prompt and "The weather of a city." in server.prompt


def test_a_stream_has_the_calls_that_the_whole_has(server: Server) -> None:
    texts = [f"I look.\n{CALL}\n{OTHER}", "It is warm < 30."]
    whole = ask(server, *texts, n=2)
    server.engine.texts = list(texts)
    with server.client.chat.completions.stream(
        model="answers",
        messages=[QUESTION],  # type: ignore[list-item]
        tools=[TOOL],
        n=2,
    ) as stream:
        deltas = [
            event.chunk.choices[0].delta
            for event in stream
            if event.type == "chunk" and event.chunk.choices
        ]
        streamed = stream.get_final_completion()
    for index in range(2):
        found, expected = streamed.choices[index], whole.choices[index]
        assert found.message.content == expected.message.content
        assert found.finish_reason == expected.finish_reason
        calls = [call.function for call in found.message.tool_calls or []]
        assert [call.arguments for call in calls] == [
            call.function.arguments for call in expected.message.tool_calls or []
        ]
    assert [choice.finish_reason for choice in whole.choices] == ["tool_calls", "stop"]
    assert [len(choice.message.tool_calls or []) for choice in whole.choices] == [2, 0]
    parts = [part for delta in deltas for part in delta.tool_calls or []]
    assert [part.index for part in parts] == [0, 1]


@pytest.mark.parametrize(
    ("mark", "rest"),
    [
        ("<|python_tag|>", '{"name": "Weather", "parameters": {"city": "Wien"}}'),
        ("[TOOL_CALLS]", '[{"name": "Weather", "arguments": {"city": "Wien"}}]'),
    ],
)
def test_a_call_is_found_whose_mark_is_a_special_token(
    tmp_path: Path, mark: str, rest: str
) -> None:
    pipeline_dir = tmp_path / "answers"
    tokenizer = byte_tokenizer(mark)
    template = "{{ tools | tojson }}{{ messages[0].content }}{% if false %}" + mark + "{% endif %}"
    release = echo_release(
        pipeline_dir, 1, chat_template=template, tokenizer=tokenizer, context=4096
    )
    set_current(pipeline_dir, release.id)
    engine = ScriptedEngine(tokenizer=tokenizer)
    text = mark + rest
    with (
        running(echo_app(pipeline_dir, engine)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        server = Server(engine, url, client)
        (choice,) = ask(server, text).choices
        chunks = list(ask(server, text, stream=True))
    (call,) = choice.message.tool_calls
    parts = [part for chunk in chunks for part in chunk.choices[0].delta.tool_calls or []]
    streamed = "".join(part.function.arguments or "" for part in parts)
    assert json.loads(call.function.arguments) == json.loads(streamed) == {"city": "Wien"}
    assert choice.finish_reason == "tool_calls"


def test_results_of_calls_are_shown_to_the_model(server: Server) -> None:
    called = ask(server, CALL).choices[0].message
    assert called.content is None
    result = {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": "31 degrees"}
    answer = ask(server, "It is.", messages=[QUESTION, called.model_dump(), result])
    assert answer.choices[0].message.content == "It is."
    assert answer.choices[0].message.tool_calls is None
    assert '"arguments": {"city": "Wien"}' in server.prompt  # an object, as templates expect
    assert "assistant: <tool_call>" in server.prompt  # no null, which would read "None"
    assert "tool: 31 degrees" in server.prompt


def test_without_a_choice_there_are_no_calls(server: Server) -> None:
    answer = ask(server, CALL, tool_choice="none")
    assert answer.choices[0].message.content == CALL
    assert answer.choices[0].finish_reason == "stop"
    assert '"city"' not in server.prompt


def test_at_most_one_call_where_they_may_not_be_parallel(server: Server) -> None:
    texts = f"{CALL}\n{OTHER}"
    answer = ask(server, texts, parallel_tool_calls=False)
    assert len(answer.choices[0].message.tool_calls) == 1
    stream = ask(server, texts, parallel_tool_calls=False, stream=True)
    parts = [chunk.choices[0].delta.tool_calls or [] for chunk in stream]
    assert [json.loads(part[0].function.arguments) for part in parts if part] == [{"city": "Wien"}]


def nested(depth: int) -> str:
    return '{"a": ' * depth + "1" + "}" * depth


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"city": "Graz"}', '{"city": "Graz"}'),
        ({"city": "Graz"}, '{"city": "Graz"}'),
        (nested(150), nested(150)),
        (json.loads(nested(150)), nested(150)),
        *[(wrong, "{}") for wrong in ("{", "", "[]", "null", None, 5, nested(100_000))],
        ('{"city": "\\ud83d"}', "{}"),
    ],
)
def test_wrong_arguments_of_an_earlier_call_count_as_none(
    server: Server, arguments: object, shown: str
) -> None:
    call = {"id": "x", "type": "function", "function": {"name": "Weather", "arguments": arguments}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    server.engine.texts = ["yes"]
    answer = httpx.post(
        f"{server.url}/v1/chat/completions",
        json={"messages": [QUESTION, message], "max_tokens": 4},
    )
    assert answer.status_code == 200, answer.text
    assert f'"arguments": {shown}' in server.prompt


def test_a_forced_call_has_no_other_form_besides(server: Server) -> None:
    body = {
        "messages": [QUESTION],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": "required",
        "response_format": {"type": "json_object"},
    }
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "tool_choice"
