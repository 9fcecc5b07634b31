"""Calls of tools are found in the text of an answer, wherever its pieces end."""

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.chat import HERMES, LLAMA3_JSON, MISTRAL, Found, ToolCallReader, ToolFormat, format_of

TOOLS = {"add", "get_weather"}
ADD = ("add", {"a": 1, "b": [2, {"c": '} "\\ {'}]})
WEATHER = ("get_weather", {"city": "Köln"})
A = json.dumps({"name": ADD[0], "arguments": ADD[1]})
W = json.dumps({"name": WEATHER[0], "arguments": WEATHER[1]}, ensure_ascii=False)
LLAMA_A = json.dumps({"name": ADD[0], "parameters": ADD[1]})
NOT_ONE = '{"temperature": 20}'


def call_of(arguments: str) -> str:
    return f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>'


DEEP = "[" * 300 + "]" * 300
NO_CALLS = [
    call_of('{"a": NaN}'),
    call_of('{"a": -Infinity}'),
    call_of('{"a": 1e999}'),
    call_of('{"a": "\\ud83d"}'),  # half of a surrogate pair, which UTF-8 cannot say
    call_of('"{\\"a\\": \\"\\\\ud83d\\"}"'),
    call_of(f'{{"a": {DEEP}}}'),
    call_of(f'{{"a": {"9" * 4301}}}'),
    call_of("[1]"),
    call_of("null"),
    call_of('"not json"'),
    call_of('"[1]"'),
    '<tool_call>{"name": {"first": "Ada"}}</tool_call>',
    '<tool_call>{"name": "\\ud83d"}</tool_call>',
]

ANSWERS: list[tuple[ToolFormat, str, str, list[tuple[str, object]]]] = [
    (HERMES, "No call, a < b.", "No call, a < b.", []),
    (HERMES, f"<tool_call>\n{A}\n</tool_call>", "", [ADD]),
    (
        HERMES,
        f"Let me see.\n<tool_call>\n{A}\n</tool_call>\n<tool_call>\n{W}\n</tool_call>",
        "Let me see.\n",
        [ADD, WEATHER],
    ),
    (HERMES, f"<tool_call>[{A}, {W}]</tool_call>", "", [ADD, WEATHER]),
    (HERMES, f"<tool_call>\n{A}", "", [ADD]),
    (HERMES, "<tool_call>\nnothing\n</tool_call>", "<tool_call>\nnothing\n</tool_call>", []),
    (HERMES, f"<tool_call>{NOT_ONE}</tool_call>", f"<tool_call>{NOT_ONE}</tool_call>", []),
    (HERMES, '<tool_call>\n{"name": "add"', '<tool_call>\n{"name": "add"', []),
    (HERMES, "<tool_call>{'name': 'add'}", "<tool_call>{'name': 'add'}", []),
    (HERMES, f"<tool_call>{A}</tool_call> Done.", "Done.", [ADD]),
    (HERMES, "it ends with <tool_", "it ends with <tool_", []),
    (HERMES, f"I use <tool_call> tags.\n<tool_call>{W}", "I use <tool_call> tags.\n", [WEATHER]),
    (HERMES, f"<tool_call>\n<tool_call>{A}", "", [ADD]),
    (HERMES, f"{NO_CALLS[0]}\n<tool_call>{A}</tool_call>", f"{NO_CALLS[0]}\n", [ADD]),
    (HERMES, f"<tool_call>[{A}, 5, {W}]", "5, " + W + "]", [ADD]),
    (HERMES, f"<tool_call> x {A}", f"<tool_call> x {A}", []),
    *[(HERMES, answer, answer, []) for answer in NO_CALLS],
    (LLAMA3_JSON, LLAMA_A, "", [ADD]),
    (LLAMA3_JSON, f" {LLAMA_A}; {W}", "", [ADD, WEATHER]),
    (LLAMA3_JSON, f"<|python_tag|>{LLAMA_A}", "", [ADD]),
    (LLAMA3_JSON, NOT_ONE, NOT_ONE, []),
    (LLAMA3_JSON, '{"name": "Ada", "born": 1815}', '{"name": "Ada", "born": 1815}', []),
    (LLAMA3_JSON, '{"name": {"first": "Ada"}}', '{"name": {"first": "Ada"}}', []),
    (LLAMA3_JSON, f"{LLAMA_A}; Done.", "Done.", [ADD]),
    (LLAMA3_JSON, f"Like {LLAMA_A}", f"Like {LLAMA_A}", []),
    (LLAMA3_JSON, "  \n", "  \n", []),
    (MISTRAL, f"[TOOL_CALLS] [{A}, {W}]", "", [ADD, WEATHER]),
    (MISTRAL, f"I see.[TOOL_CALLS][{W}]", "I see.", [WEATHER]),
    (MISTRAL, f"[TOOL_CALLS] is it. [TOOL_CALLS][{W}]", "[TOOL_CALLS] is it. ", [WEATHER]),
    (MISTRAL, f"[TOOL_CALLS]add[ARGS]{json.dumps(ADD[1])}", "", [ADD]),
    (MISTRAL, f"[TOOL_CALLS]add[ARGS] \n{json.dumps(ADD[1])}", "", [ADD]),
    (
        MISTRAL,
        f"[TOOL_CALLS]add[CALL_ID]x1[ARGS]{json.dumps(ADD[1])}"
        f'[TOOL_CALLS]get_weather{{"city": "Köln"}}',
        "",
        [ADD, WEATHER],
    ),
]


@pytest.mark.parametrize(("format", "answer", "text", "calls"), ANSWERS)
@given(cuts=st.lists(st.integers(0, 200), max_size=12), by_character=st.booleans())
def test_calls_and_text_are_the_same_wherever_pieces_end(
    format: ToolFormat,
    answer: str,
    text: str,
    calls: list[tuple[str, object]],
    cuts: list[int],
    by_character: bool,
) -> None:
    places = list(range(len(answer))) if by_character else [min(c, len(answer)) for c in cuts]
    parts = read(format, answer, places)
    assert "".join(part.text for part in parts) == text
    found = [call for part in parts for call in part.calls]
    functions = [call["function"] for call in found]
    assert [(each["name"], json.loads(each["arguments"])) for each in functions] == calls
    assert all(call["id"].isalnum() and len(call["id"]) == 9 for call in found)
    assert len({call["id"] for call in found}) == len(found)


def read(format: ToolFormat, answer: str, cuts: list[int]) -> list[Found]:
    """What becomes final with each of the pieces of an answer that is cut at these places."""
    reader = ToolCallReader(format, TOOLS)
    places = [0, *sorted(cuts), len(answer)]
    pieces = [answer[begin:end] for begin, end in pairwise(places)]
    return [*map(reader.add, pieces), reader.add("", is_end=True)]


def joined(parts: list[Found]) -> tuple[str, list[tuple[str, str]]]:
    functions = [call["function"] for part in parts for call in part.calls]
    calls = [(each["name"], each["arguments"]) for each in functions]
    return "".join(part.text for part in parts), calls


CALL_PARTS = [A, A, W, LLAMA_A, NOT_ONE, '{"a": 1}', "{", "}", "[", "]", ",", ";", '"', "\\"]
OTHER_PARTS = [
    "</tool_call>",
    "</tool_call>",
    "</",
    "[ARGS]",
    "[CALL_ID]",
    "add",
    " ",
    "\n",
    " Done. ",
]


@settings(max_examples=400)
@given(format=st.sampled_from([HERMES, LLAMA3_JSON, MISTRAL]), data=st.data())
def test_any_text_is_read_the_same_wherever_pieces_end(
    format: ToolFormat, data: st.DataObject
) -> None:
    begin = format.begin
    parts = st.one_of(
        st.sampled_from([begin, begin, begin[:1], begin[:4]]),
        st.sampled_from(CALL_PARTS),
        st.sampled_from(OTHER_PARTS),
    )
    fragments = data.draw(st.lists(parts, max_size=12))
    answer = "".join(fragments)
    whole = joined(read(format, answer, []))
    cuts = data.draw(st.lists(st.integers(0, len(answer)), max_size=12))
    assert joined(read(format, answer, cuts)) == whole
    assert joined(read(format, answer, list(range(len(answer))))) == whole


@pytest.mark.parametrize(
    ("answer", "arguments"),
    [
        (call_of('{"a":1.0,  "b": 2}'), '{"a": 1.0, "b": 2}'),
        (call_of(f'{{"a": {"9" * 4300}}}'), f'{{"a": {"9" * 4300}}}'),
        (call_of('{"a": "\\u00e9"}'), '{"a": "é"}'),
        (call_of('"{\\"a\\": 1}"'), '{"a": 1}'),
        ('<tool_call>{"parameters" : {"a": 1} , "name":"add"}', '{"a": 1}'),
        ('<tool_call>{"name": "add"}', "{}"),
        ('<tool_call>{"name": "add", "\\u0061rguments": {}, "arguments": {"a": 2}}', '{"a": 2}'),
    ],
)
def test_arguments_are_the_text_of_an_object(answer: str, arguments: str) -> None:
    assert joined(read(HERMES, answer, [])) == ("", [("add", arguments)])


@pytest.mark.parametrize(
    ("template", "format"),
    [
        ('return a json object within <tool_call></tool_call>: <tool_call>{"name": …', HERMES),
        ("{{- '<|python_tag|>' + tool_call.name }}", LLAMA3_JSON),
        ('Respond in the format {"name": function name, "parameters": …}.', LLAMA3_JSON),
        ("{{- '[TOOL_CALLS] [' }}", MISTRAL),
        ("{{ message.content }}", HERMES),
    ],
)
def test_the_template_says_which_format(template: str, format: ToolFormat) -> None:
    assert format_of(template) is format
