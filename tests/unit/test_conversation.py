"""Ways to write the same conversation have one form, and what no model can be shown is refused."""

from typing import Any

import pytest

from serving.chat_template import ConversationError, normalise

USER = {"role": "user", "content": "Weather?"}
FUNCTION = {"name": "weather", "arguments": '{"city": "Röm", "days": [1, 2]}'}
CALL = {"id": "c1", "type": "function", "function": FUNCTION}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
SCHEMA = {"name": "weather", "description": "d", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": SCHEMA}


def calling(**changes: Any) -> dict[str, Any]:
    return {**CALLING, **changes}


def called(**changes: Any) -> dict[str, Any]:
    return calling(tool_calls=[{**CALL, "function": {**FUNCTION, **changes}}])


@pytest.mark.parametrize(
    ("written", "form"),
    [
        (USER, USER),
        ({**USER, "id": "m1", "timestamp": 7, "metadata": {"a": 1}}, USER),
        ({**USER, "name": None, "tool_calls": None, "reasoning_content": ""}, USER),
        ({**USER, "tool_calls": []}, USER),
        ({**USER, "content": [{"type": "text", "text": "Weather?", "image": None}]}, USER),
        ({**USER, "content": [{"type": "input_text", "text": "Weather?"}]}, USER),
        ({**USER, "content": ["Weather?"]}, USER),
        ({**USER, "content": []}, {**USER, "content": ""}),
        ({"role": "assistant"}, {"role": "assistant", "content": ""}),
        (
            {**USER, "content": ["a", {"text": "b"}]},
            {**USER, "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        ),
        (CALLING, CALLING),
        (calling(content=""), CALLING),
        (calling(content=[]), CALLING),
        (called(arguments='{"city":"R\\u00f6m","days":[1,2]}'), CALLING),
        (called(arguments={"city": "Röm", "days": [1, 2]}), CALLING),
        (called(arguments={"city": "Röm", "days": [1, 2], "unit": None}), CALLING),
        (called(arguments='{"unit":null}'), called(arguments='{"unit": null}')),
        (called(arguments=""), called(arguments="{}")),
        (called(arguments=None), called(arguments="{}")),
        (calling(tool_calls=[{"id": "c1", **FUNCTION}]), CALLING),
        (
            {"role": "assistant", "content": None, "function_call": FUNCTION},
            calling(tool_calls=[{"type": "function", "function": FUNCTION}]),
        ),
        (
            {"role": "function", "name": "weather", "content": "21"},
            {"role": "tool", "name": "weather", "content": "21"},
        ),
        (
            {"role": "assistant", "content": "b", "reasoning_content": "so"},
            {"role": "assistant", "content": "b", "reasoning_content": "so"},
        ),
    ],
)
def test_a_message_has_one_form(written: dict[str, Any], form: dict[str, Any]) -> None:
    assert normalise([written]).messages == (form,)
    assert normalise([form]).messages == (form,)


@pytest.mark.parametrize(
    "written",
    [
        [TOOL],
        (TOOL,),
        [SCHEMA],
        [{"type": "function", **SCHEMA}],  # the API of responses
        [{"function": {**SCHEMA, "strict": None}}],
        '[{"description": "d", "parameters": {"type": "object"}, "name": "weather"}]',
    ],
)
def test_a_tool_has_one_form_with_its_fields_in_order(written: Any) -> None:
    (tool,) = normalise([USER], written).tools
    assert str(tool) == str(TOOL)


@pytest.mark.parametrize("nothing", [None, [], "", "[]", "null"])
def test_nothing_is_no_tools(nothing: Any) -> None:
    assert normalise([USER], nothing).tools == ()


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"content": "a"}, "message 2 has no `role`"),
        ({**USER, "content": {"a": 1}}, r"message 2 \(user\): `content` is {'a': 1}, not text"),
        ({**USER, "content": 7}, "`content` is 7"),
        ({**USER, "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "'image_url'"),
        ({**USER, "content": [{"type": "text"}]}, "only text is supported"),
        (called(arguments='{"city": "Rom'), "`arguments` is text that is not JSON"),
        (called(arguments="[1]"), r"the arguments of 'weather' are \[1\], not an object"),
        (called(arguments='{"a": NaN}'), "`arguments` is text that is not JSON"),
        (calling(tool_calls={"a": 1}), "`tool_calls` is not a list of objects"),
        (calling(tool_calls=[{"type": "custom", "custom": {}}]), "names no function"),
        ("text", "`messages` is not a list of objects"),
    ],
)
def test_what_no_model_can_be_shown_is_named(message: Any, reason: str) -> None:
    with pytest.raises(ConversationError, match=reason):
        normalise([USER, message])
    with pytest.raises(ConversationError, match="names no function"):
        normalise([USER], [{"type": "retrieval"}])
