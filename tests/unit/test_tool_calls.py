"""Calls of tools are found in the text of an answer, wherever its pieces end."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.tool_calls import FORMATS, FormatName, ToolCallReader, format_of

NAMES = ("add", "get_weather")
ADD = ("add", {"a": 1, "b": [2, {"c": '} "\\ {'}]})
WEATHER = ("get_weather", {"city": "Köln"})
A = json.dumps({"name": ADD[0], "arguments": ADD[1]})
W = json.dumps({"name": WEATHER[0], "arguments": WEATHER[1]}, ensure_ascii=False)
LLAMA_A = json.dumps({"name": ADD[0], "parameters": ADD[1]})
NOT_ONE = '{"temperature": 20}'

ANSWERS: list[tuple[FormatName, str, str, list[tuple[str, object]]]] = [
    ("hermes", "No call, a < b.", "No call, a < b.", []),
    ("hermes", f"<tool_call>\n{A}\n</tool_call>", "", [ADD]),
    (
        "hermes",
        f"Let me see.\n<tool_call>\n{A}\n</tool_call>\n<tool_call>\n{W}\n</tool_call>",
        "Let me see.\n",
        [ADD, WEATHER],
    ),
    ("hermes", f"<tool_call>[{A}, {W}]</tool_call>", "", [ADD, WEATHER]),
    ("hermes", f"<tool_call>\n{A}", "", [ADD]),
    ("hermes", "<tool_call>\nnothing\n</tool_call>", "<tool_call>\nnothing\n</tool_call>", []),
    ("hermes", f"<tool_call>{NOT_ONE}</tool_call>", f"<tool_call>{NOT_ONE}</tool_call>", []),
    ("hermes", '<tool_call>\n{"name": "add"', '<tool_call>\n{"name": "add"', []),
    ("hermes", "<tool_call>{'name': 'add'}", "<tool_call>{'name': 'add'}", []),
    ("hermes", f"<tool_call>{A}</tool_call> Done.", "Done.", [ADD]),
    ("hermes", "it ends with <tool_", "it ends with <tool_", []),
    ("llama3_json", LLAMA_A, "", [ADD]),
    ("llama3_json", f" {LLAMA_A}; {W}", "", [ADD, WEATHER]),
    ("llama3_json", f"<|python_tag|>{LLAMA_A}", "", [ADD]),
    ("llama3_json", NOT_ONE, NOT_ONE, []),
    ("llama3_json", '{"name": "Ada", "born": 1815}', '{"name": "Ada", "born": 1815}', []),
    ("llama3_json", f"Like {LLAMA_A}", f"Like {LLAMA_A}", []),
    ("llama3_json", "  \n", "  \n", []),
    ("mistral", f"[TOOL_CALLS] [{A}, {W}]", "", [ADD, WEATHER]),
    ("mistral", f"I see.[TOOL_CALLS][{W}]", "I see.", [WEATHER]),
    ("mistral", f"[TOOL_CALLS]add[ARGS]{json.dumps(ADD[1])}", "", [ADD]),
    (
        "mistral",
        f"[TOOL_CALLS]add[CALL_ID]x1[ARGS]{json.dumps(ADD[1])}"
        f'[TOOL_CALLS]get_weather{{"city": "Köln"}}',
        "",
        [ADD, WEATHER],
    ),
]


@pytest.mark.parametrize(("name", "answer", "text", "calls"), ANSWERS)
@given(cuts=st.lists(st.integers(0, 200), max_size=12), by_character=st.booleans())
def test_calls_and_text_are_the_same_wherever_pieces_end(
    name: FormatName,
    answer: str,
    text: str,
    calls: list[tuple[str, object]],
    cuts: list[int],
    by_character: bool,
) -> None:
    reader = ToolCallReader(FORMATS[name], NAMES)
    places = range(len(answer)) if by_character else sorted(min(c, len(answer)) for c in cuts)
    pieces = [
        answer[begin:end] for begin, end in zip([0, *places], [*places, len(answer)], strict=True)
    ]
    parts = [reader.add(piece) for piece in pieces] + [reader.add("", is_end=True)]
    assert "".join(part.text for part in parts) == text
    found = [call for part in parts for call in part.calls]
    assert [(call.name, json.loads(call.arguments)) for call in found] == calls
    assert all(call.id.isalnum() and len(call.id) == 9 for call in found)
    assert len({call.id for call in found}) == len(found)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ('return a json object within <tool_call></tool_call>: <tool_call>{"name": …', "hermes"),
        ("{{- '<|python_tag|>' + tool_call.name }}", "llama3_json"),
        ('Respond in the format {"name": function name, "parameters": …}.', "llama3_json"),
        ("{{- '[TOOL_CALLS] [' }}", "mistral"),
        ("{{ message.content }}", "hermes"),
    ],
)
def test_the_template_says_which_format(template: str, name: FormatName) -> None:
    assert format_of(template) is FORMATS[name]
