"""Turns the columns of a record into the columns that a row has. It knows these columns by their
own names, by the names in the settings, and by the names that the formats Alpaca and ShareGPT
use."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from pipeline.retrain.settings import ColumnSettings

Columns = Mapping[str, object]
KNOWN = (
    "`text`; or `prompt` and `completion`; or `messages`; or those of Alpaca (`instruction`, "
    "`output`) or ShareGPT (`conversations`)"
)
_SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}
"""The speaker in `from`, as ShareGPT and similar formats write it → the role in a chat template."""


def renaming(settings: ColumnSettings) -> Callable[[Columns], Columns]:
    """A function that turns the columns of a record into the columns of a row. These are `messages`
    (possibly with `tools`), or `prompt` and `completion`, or `text`. The function raises ValueError
    if the record has none of the known columns."""
    return partial(_known, named=settings.model_dump(exclude_none=True))


def _known(record: Columns, named: Mapping[str, str]) -> Columns:
    given = {known: record[name] for known, name in named.items() if name in record}
    # A record may have the columns of several formats. Try the columns in the settings first.
    for columns in (given, {**record, **given}):
        for form in (_messages, _prompt_and_completion, _conversations, _alpaca, _text):
            found = form(columns)
            if found is not None:
                return found
    raise ValueError(_nothing_known(record, named))


def _nothing_known(record: Columns, named: Mapping[str, str]) -> str:
    columns = ", ".join(map(repr, record)) or "(none)"
    if named:
        asked = ", ".join(f'{known} = "{name}"' for known, name in named.items())
        return (
            f"nothing to learn from in the columns {columns}; [pipelines.data.columns] says "
            f"{asked}; the known columns are {KNOWN}"
        )
    return (
        f"nothing to learn from in the columns {columns}; the known columns are {KNOWN}; name "
        'others under [pipelines.data.columns], as prompt = "question" and completion = "answer"'
    )


def _messages(columns: Columns) -> Columns | None:
    if columns.get("messages") is None:
        return None
    return {"messages": _roles(columns["messages"]), **_tools(columns)}


def _prompt_and_completion(columns: Columns) -> Columns | None:
    if not {"prompt", "completion"} <= columns.keys():
        return None
    prompt, completion = columns["prompt"], columns["completion"]
    if prompt is None and completion is None:
        return None  # a table has all columns for each row
    if prompt in ("", []):
        raise ValueError(
            "`prompt` is empty, and a server answers no empty prompt; write text rows as `text`"
        )
    if isinstance(prompt, list) and isinstance(completion, list):
        return {"messages": _roles([*prompt, *completion]), **_tools(columns)}
    return {"prompt": prompt, "completion": completion}


def _conversations(columns: Columns) -> Columns | None:
    if columns.get("conversations") is None:
        return None
    messages = _roles(columns["conversations"])
    return {"messages": _after_system(columns, messages), **_tools(columns)}


def _alpaca(columns: Columns) -> Columns | None:
    if not {"instruction", "output"} <= columns.keys():
        return None
    instruction, more, output = (columns.get(key) for key in ("instruction", "input", "output"))
    if instruction is None and output is None:
        return None
    for column, value in (("instruction", instruction), ("output", output)):
        if not isinstance(value, str):
            raise ValueError(f"`{column}` holds {kind(value)}, not text")
    asked = f"{instruction}\n\n{more}" if isinstance(more, str) and more else instruction
    messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": output}]
    return {"messages": _after_system(columns, messages)}


def _text(columns: Columns) -> Columns | None:
    return {"text": columns["text"]} if "text" in columns else None


def _roles(messages: object) -> object:
    """The messages with `role` and `content`, even if they use ShareGPT's `from` and `value`."""
    if not isinstance(messages, list):
        return messages
    return [_role(message) for message in messages]


def _role(message: Any) -> Any:
    if not isinstance(message, dict) or not {"from", "value"} <= message.keys():
        return message
    speaker = message["from"]
    if not isinstance(speaker, str) or speaker not in _SPEAKERS:
        raise ValueError(f"a message is from {speaker!r}; write one of {', '.join(_SPEAKERS)}")
    return {"role": _SPEAKERS[speaker], "content": message["value"]}


def _after_system(columns: Columns, messages: object) -> object:
    system = columns.get("system")
    if isinstance(messages, list) and isinstance(system, str) and system:
        return [{"role": "system", "content": system}, *messages]
    return messages


def _tools(columns: Columns) -> Columns:
    """The column `tools`, or nothing if it is empty. Tables often hold it as JSON text."""
    tools = columns.get("tools")
    if isinstance(tools, str) and tools:
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise ValueError(f"`tools` holds text that is not JSON ({error})") from error
    return {"tools": tools} if tools else {}


def kind(value: object) -> str:
    """The kind of a value, in words for an error message."""
    names = {dict: "an object", list: "a list", str: "text", type(None): "nothing"}
    return names.get(type(value), f"the value {value!r}")
