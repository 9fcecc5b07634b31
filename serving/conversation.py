"""`normalise`: the one form of a conversation, for training and for serving.

The same conversation is written in many ways: by the API of OpenAI, by agent frameworks, by the
table formats of datasets. A row and a request that mean the same become equal here, so the model is
asked what it was trained on. What depends on the chat template follows in `ChatTemplate.render`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Message = Mapping[str, Any]
"""`role`, `content`, and those of the other `FIELDS` that have a value. The content is a text, a
list of at least two parts of the form `{"type": "text", "text": …}`, or None: no text beside calls.
"""
FIELDS = (
    *("role", "content", "name", "tool_calls", "tool_call_id"),
    *("reasoning_content", "reasoning", "thinking", "tool_responses"),
)
"""The fields of a message that chat templates read. Others, such as `id` and `timestamp`, are left
out."""
_TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
"""Type of a content part → its field with the text. vLLM accepts these types as text too."""

_TOOL_FIELDS = ("name", "description", "parameters")


class ConversationError(ValueError):
    """No model could be shown this conversation: the reason, with the number of the message."""


@dataclass(frozen=True, kw_only=True)
class Conversation:
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    """Each of the form `{"type": "function", "function": {"name": …, …}}`."""
    documents: tuple[Mapping[str, Any], ...] = ()


def normalise(messages: object, tools: object = None, documents: object = None) -> Conversation:
    """The conversation in its one form. Raises ConversationError.

    - Arrow fills in null for each key that another row has: such keys are left out, at any depth.
      But a null in arguments that are JSON text is kept, because somebody has written it there.
    - An empty list is no list.
    - The arguments of a call are the JSON text of an object, also if they are an object. A
      `function_call` is one of the `tool_calls`, and the role `function` is `tool`.
    - Text parts are parts of the type `text`, and one part alone is a text.

    The one form of a conversation in its one form is this form.
    """
    return Conversation(
        messages=tuple(_message(*each) for each in enumerate(_objects(messages, "messages"), 1)),
        tools=tuple(_tool(tool) for tool in _objects(tools, "tools")),
        documents=tuple(_objects(documents, "documents")),
    )


def parts_of(content: str | list[dict[str, str]] | None) -> list[dict[str, str]]:
    """The content of a message as a list of parts."""
    if isinstance(content, list):
        return content
    return [{"type": "text", "text": content}] if content else []


def text_of(content: str | list[dict[str, str]] | None) -> str:
    """The content of a message as one text."""
    return "\n".join(part["text"] for part in parts_of(content))


def _objects(value: object, name: str) -> Sequence[dict[str, Any]]:
    found = _without_nulls(_decoded(value, name) if isinstance(value, str) else value)
    if found in (None, ""):
        return ()
    if not isinstance(found, list | tuple) or not all(isinstance(each, dict) for each in found):
        raise ConversationError(f"`{name}` is not a list of objects")
    return found


def _without_nulls(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_without_nulls(each) for each in value]
    if isinstance(value, Mapping):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return value


def _decoded(text: str, name: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse_constant) if text.strip() else None
    except (ValueError, RecursionError) as error:
        raise ConversationError(f"`{name}` is text that is not JSON ({error})") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON value")


def _message(number: int, message: dict[str, Any]) -> Message:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ConversationError(f"message {number} has no `role`")
    try:
        calls = [_call(each) for each in _objects(message.get("tool_calls"), "tool_calls")]
        if legacy := message.get("function_call"):
            calls.append(_call({"function": legacy}))
        content = _content(message.get("content"))
    except ConversationError as error:
        raise ConversationError(f"message {number} ({role}): {error}") from None
    return {
        **{key: message[key] for key in FIELDS if message.get(key)},
        "role": "tool" if role == "function" else role,
        "content": content or (None if calls else ""),
        **({"tool_calls": calls} if calls else {}),
    }


def _content(content: object) -> str | list[dict[str, str]]:
    if isinstance(content, list):
        texts = [_text(part) for part in content]
        return [{"type": "text", "text": text} for text in texts] if texts[1:] else "".join(texts)
    if content is not None and not isinstance(content, str):
        raise ConversationError(f"`content` is {content!r}, not text")
    return content or ""


def _text(part: object) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, dict) else part
    text = part.get(_TEXT_PARTS.get(str(kind), "")) if isinstance(part, dict) else None
    if not isinstance(text, str):
        raise ConversationError(f"content part {kind!r}: only text is supported")
    return text


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function", call)
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name:
        raise ConversationError(f"the call {call!r} names no function")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _decoded(arguments, "arguments")
    if not isinstance(arguments, dict | None):
        raise ConversationError(f"the arguments of {name!r} are {arguments!r}, not an object")
    named = {"id": call["id"]} if call.get("id") else {}
    text = json.dumps(arguments or {}, ensure_ascii=False)
    return {**named, "type": "function", "function": {"name": name, "arguments": text}}


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function", {key: tool[key] for key in tool if key != "type"})
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ConversationError(f"the tool {tool!r} names no function")
    # Templates write tools as JSON, so the order of the fields is a part of the prompt.
    first = {key: function[key] for key in _TOOL_FIELDS if key in function}
    return {"type": "function", "function": first | function}
