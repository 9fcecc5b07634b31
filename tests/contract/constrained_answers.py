"""What every engine that follows grammars must keep: one suite, run against each of them.

The networks are random, so whatever is right in an answer was forced.
"""

import json
import re
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel, ConfigDict, Field

from serving.weights.release import Release
from tests.contract.test_torch_engine_conformance import torch_release
from tests.serving_fixtures import CHAT_TEMPLATE, byte_tokenizer

MAX_TOKENS = 400
MESSAGES: Any = [{"role": "user", "content": "A box, please."}]
SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "blue"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "is_full": {"type": "boolean"},
    },
    "required": ["colour", "count", "is_full"],
    "additionalProperties": False,
}
CHOICES = ["grün", 'a "quoted" one', "back\\slash", "grüner"]
GBNF = 'root ::= "<" [a-c] [a-c] ">" | "none"'
NAMED_LARK = '?start: named\n!named: "a" _IS "b"\n_IS: "::="'
LARK = 'start: "<" LETTER LETTER ">" | "none"\nLETTER: /[a-c]/'


class Box(BaseModel):
    colour: Literal["red", "blue"]
    count: int
    is_full: bool


class Bag(BaseModel):
    """Its schema has `uniqueItems`, as a keyword, as the name of a property and inside data."""

    model_config = ConfigDict(extra="forbid")

    things: set[Literal["a", "b"]] = Field(max_length=3)
    uniqueItems: bool
    kind: Literal["uniqueItems"]

    @classmethod
    def response_format(cls) -> dict[str, Any]:
        schema = {"name": "bag", "schema": cls.model_json_schema(), "strict": True}
        return {"type": "json_schema", "json_schema": schema}


class Paint(BaseModel):
    colour: Literal["red", "blue"]


class Ask(BaseModel):
    paint: Paint  # so that the schema refers to another within itself


def constrained_release(home: Path, **shape: Any) -> Release:
    """With a tokenizer that `transformers` loads too, and a chat template."""
    files = home / "files"
    files.mkdir(parents=True)
    (files / "chat_template.jinja").write_text("{{ tools | tojson if tools }}" + CHAT_TEMPLATE)
    (files / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"})
    )
    settings = {"tied": False, "context": 2048, **shape}
    return torch_release(home, 1, **settings)


def is_of_schema(text: str) -> bool:
    found = Box.model_validate_json(text)
    return 0 <= found.count <= 99 and list(json.loads(text)) == list(SCHEMA["properties"])


def is_compact(text: str) -> bool:
    return is_of_schema(text) and json.dumps(json.loads(text), separators=(",", ":")) == text


def is_underscored(text: str) -> bool:
    """With the white space that the pattern demands: one `_`, so this is no JSON any more."""
    return text.startswith("{_") and is_of_schema(
        text.replace("is_full", "is~full").replace("_", "").replace("~", "_")
    )


CONSTRAINTS: list[tuple[dict[str, Any], Any]] = [
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "b", "schema": SCHEMA},
            }
        },
        is_of_schema,
    ),
    ({"structured_outputs": {"json": SCHEMA}}, is_of_schema),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, is_of_schema),
    (
        {"structured_outputs": {"regex": "[0-9]{3}-[a-f]{2}"}},
        re.compile("[0-9]{3}-[a-f]{2}").fullmatch,
    ),
    ({"structured_outputs": {"regex": "(ab){2,5}c"}}, re.compile("(ab){2,5}c").fullmatch),
    ({"structured_outputs": {"choice": CHOICES}}, CHOICES.__contains__),
    ({"structured_outputs": {"choice": ["yes"]}}, ["yes"].__contains__),
    ({"structured_outputs": {"grammar": GBNF}}, re.compile("<[a-c]{2}>|none").fullmatch),
    ({"structured_outputs": {"grammar": LARK}}, re.compile("<[a-c]{2}>|none").fullmatch),
    ({"structured_outputs": {"grammar": "?" + LARK}}, re.compile("<[a-c]{2}>|none").fullmatch),
    ({"structured_outputs": {"grammar": NAMED_LARK}}, "a::=b".__eq__),
    ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, is_compact),
    ({"structured_outputs": {"json": SCHEMA, "whitespace_pattern": ""}}, is_compact),
    ({"structured_outputs": {"json": SCHEMA, "whitespace_pattern": "_"}}, is_underscored),
    ({"structured_outputs": {"json": Bag.model_json_schema()}}, Bag.model_validate_json),
    ({"response_format": Bag.response_format()}, Bag.model_validate_json),
]


class ConstrainedAnswers:
    """Needs the fixture `url`, of a server whose release is `constrained_release`."""

    has_own_logprobs = True
    """Whether logprobs are those of the model itself, and not of the tokens that are allowed."""

    @pytest.mark.parametrize(("body", "is_right"), CONSTRAINTS)
    def test_text_is_what_was_asked_for(self, url: str, body: Any, is_right: Any) -> None:
        for seed in range(3):
            choice = complete(url, seed=seed, **body)
            assert is_right(choice["text"]), choice["text"]
            assert choice["finish_reason"] == "stop"
        assert is_right(complete(url, temperature=0.0, repetition_penalty=1.2, **body)["text"])

    def test_json_of_any_shape(self, url: str) -> None:
        """It may go on until there are no more tokens; what there is of it is the start of one."""
        for seed in range(3):
            choice = complete(url, seed=seed, response_format={"type": "json_object"})
            assert choice["text"].lstrip().startswith("{")
            if choice["finish_reason"] == "stop":
                assert isinstance(json.loads(choice["text"]), dict)

    def test_it_ends_without_a_token_for_it(self, url: str) -> None:
        choice = complete(
            url, structured_outputs={"choice": ["yes"]}, ignore_eos=True, min_tokens=9
        )
        assert (choice["text"], choice["finish_reason"]) == ("yes", "stop")

    def test_many_sequences_streamed_side_by_side(self, url: str) -> None:
        whole = post(url, n=3, seed=7, structured_outputs={"json": SCHEMA}).json()["choices"]
        texts = [""] * 3
        body = {"n": 3, "seed": 7, "structured_outputs": {"json": SCHEMA}, "stream": True}
        for line in post(url, **body).text.splitlines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line[6:])["choices"]
                texts[choice["index"]] += choice["text"]
        assert texts == [each["text"] for each in whole]
        assert all(map(is_of_schema, texts))
        assert len(set(texts)) > 1

    def test_a_stop_string_cuts_it(self, url: str) -> None:
        choice = complete(url, structured_outputs={"regex": "abc(de){2}f"}, stop=["ed"])
        assert (choice["text"], choice["finish_reason"]) == ("abcd", "stop")

    def test_logprobs(self, url: str) -> None:
        tokenizer = byte_tokenizer()
        found = complete(url, structured_outputs={"regex": "[a-z]{4}"}, logprobs=2, seed=1)
        text = tokenizer.encode("Hello" + found["text"]).ids
        scored = post(url, prompt=text, max_tokens=0, echo=True, logprobs=2).json()["choices"][0]
        expected = scored["logprobs"]["token_logprobs"][-4:]
        logprobs = found["logprobs"]["token_logprobs"][:4]
        if self.has_own_logprobs:
            assert logprobs == pytest.approx(expected, abs=1e-3)
        else:
            assert all(ours > own for ours, own in zip(logprobs, expected, strict=True))

    def test_allowed_tokens(self, url: str) -> None:
        tokenizer = byte_tokenizer()
        allowed = tokenizer.encode("xyz").ids
        free = complete(url, allowed_token_ids=allowed, max_tokens=20)
        assert set(free["text"]) <= set("xyz") and len(free["text"]) == 20
        both = complete(
            url,
            allowed_token_ids=allowed,
            structured_outputs={"regex": "[a-z]{5}"},
            ignore_eos=True,
        )
        assert re.fullmatch("[xyz]{5}", both["text"][:5])

    @pytest.mark.parametrize(
        ("body", "param"),
        [
            ({"structured_outputs": {"regex": "(unclosed"}}, "structured_outputs"),
            ({"structured_outputs": {"regex": "(unclosed"}, "stream": True}, "structured_outputs"),
            ({"structured_outputs": {"grammar": "root ::= ((("}}, "structured_outputs"),
            ({"structured_outputs": {"json": "{not json"}}, "structured_outputs"),
            ({"structured_outputs": {"json": {"type": "no such type"}}}, "structured_outputs"),
            ({"structured_outputs": {"json": False}}, "structured_outputs"),
            ({"structured_outputs": {}}, "structured_outputs"),
            ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
            ({"structured_outputs": {"choice": []}}, "structured_outputs"),
            ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs"),
            (
                {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
                "structured_outputs",
            ),
            ({"structured_outputs": {"regex": "a" * 200_000}}, "structured_outputs"),
            ({"response_format": {"type": "xml"}}, "response_format"),
            ({"response_format": {"type": "json_schema"}}, "response_format"),
            ({"response_format": "json"}, "response_format"),
            ({"allowed_token_ids": []}, "allowed_token_ids"),
            ({"allowed_token_ids": [100_000]}, "allowed_token_ids"),
        ],
    )
    def test_what_cannot_be_followed_is_refused(self, url: str, body: Any, param: str) -> None:
        answer = post(url, **body)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["param"] == param
        assert error["message"].startswith(param)
        # Whoever asks next is answered.
        assert complete(url, structured_outputs={"choice": ["yes"]})["text"] == "yes"

    def test_text_is_no_constraint(self, url: str) -> None:
        plain = complete(url, seed=3, max_tokens=8)
        assert complete(url, seed=3, max_tokens=8, response_format={"type": "text"}) == plain

    def test_openai_parses_what_it_asked_for(self, url: str) -> None:
        client = OpenAI(base_url=f"{url}/v1", api_key="none")
        options: Any = {"model": "answers", "max_tokens": MAX_TOKENS, "response_format": Box}
        found = client.chat.completions.parse(messages=MESSAGES, seed=5, **options)
        message = found.choices[0].message
        assert isinstance(message.parsed, Box)
        with client.chat.completions.stream(messages=MESSAGES, seed=5, **options) as stream:
            streamed = stream.get_final_completion().choices[0].message
        assert streamed.parsed == message.parsed
        assert streamed.content == message.content

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize(
        ("choice", "parallel"), [("required", True), ("required", False), ("Ask", True)]
    )
    def test_a_forced_call_fits_its_tool(
        self, url: str, choice: str, parallel: bool, stream: bool
    ) -> None:
        tools = {"Ask": Ask, "Box": Box}
        body: Any = {
            "model": "answers",
            "messages": MESSAGES,
            "tools": [openai.pydantic_function_tool(each) for each in tools.values()],
            "tool_choice": choice,
            "parallel_tool_calls": parallel,
            "max_tokens": MAX_TOKENS,
            # A random network ends no list.
            "logit_bias": {byte_tokenizer().encode("]").ids[0]: 100},
        }
        if choice != "required":
            body["tool_choice"] = {"type": "function", "function": {"name": choice}}
        client = OpenAI(base_url=f"{url}/v1", api_key="none")
        for seed in range(4):
            if stream:
                with client.chat.completions.stream(seed=seed, **body) as events:
                    completion = events.get_final_completion()
            else:
                completion = client.chat.completions.parse(seed=seed, **body)
            (found,) = completion.choices
            # As with OpenAI and vLLM, a call of a named tool ends with `stop`.
            assert found.finish_reason == ("tool_calls" if choice == "required" else "stop")
            assert not found.message.content
            assert found.message.tool_calls
            assert parallel or len(found.message.tool_calls) == 1
            for call in found.message.tool_calls:
                tools[call.function.name].model_validate_json(call.function.arguments)
                assert choice in ("required", call.function.name)


def post(url: str, **body: Any) -> httpx.Response:
    asked = {"prompt": "Hello", "max_tokens": MAX_TOKENS, "temperature": 1.0, **body}
    return httpx.post(f"{url}/v1/completions", json=asked, timeout=120)


def complete(url: str, **body: Any) -> Any:
    answer = post(url, **body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]
