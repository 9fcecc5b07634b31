"""Finds calls of tools in the text of an answer, and forces them.

Models have no common format for calls. Each family of models uses the format of its chat template.
The formats have the names of vLLM's option `--tool-call-parser`
(https://docs.vllm.ai/en/stable/features/tool_calling.html):

`hermes`      `<tool_call>{"name": …, "arguments": {…}}</tool_call>`. Qwen 2.5 and 3 use this format
              too. SmolLM2 writes a list of such objects between one pair of tags.
`llama3_json` the answer is `{"name": …, "parameters": {…}}`, or the same after `<|python_tag|>`.
              Several calls are separated by semicolons.
`mistral`     `[TOOL_CALLS][{"name": …, "arguments": {…}}]`; later models write
              `[TOOL_CALLS]name[ARGS]{…}`.
"""

import json
import re
import secrets
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from serving.chat_schemas import Tool, parse_object
from serving.detokenizer import overlap
from serving.engine import Grammar
from serving.openai_schemas import schema_text
from serving.settings import FormatName

_DECODER = json.JSONDecoder()
_NUM_ID_CHARACTERS = 9
"""Mistral's templates refuse ids of another length, and ids that are not alphanumeric."""
_SEPARATORS = r"\s\[\],;"
"""Models write these characters around the objects of their calls."""


@dataclass(frozen=True)
class ToolFormat:
    """How a model marks calls of tools in its text."""

    begin: str
    """The mark before calls."""
    end: str | None = None
    """The mark after calls. Text may follow this mark. None if an answer ends with its calls."""
    is_bare: bool = False
    """Whether an answer may also begin with a call that has no mark `begin` before it."""
    is_named: bool = False
    """Whether a call may also be a name and an object with the arguments, instead of an object with
    both."""

    @cached_property
    def before_object(self) -> re.Pattern[str]:
        """The text before an object."""
        name = r"(?P<name>[\w.-]{1,64})(?:\[CALL_ID\]\w{1,64})?(?:\[ARGS\])?\s*"
        return re.compile(
            rf"(?:{re.escape(self.begin)}|[{_SEPARATORS}])*"
            rf"(?:{name if self.is_named else ''})?(?=\{{)"
        )

    @cached_property
    def after_calls(self) -> re.Pattern[str]:
        """What only separates calls from the text that follows."""
        end = "" if self.end is None else rf"(?:{re.escape(self.end)}\s*)?"
        return re.compile(rf"[{_SEPARATORS}]*{end}")


FORMATS: dict[FormatName, ToolFormat] = {
    "hermes": ToolFormat("<tool_call>", "</tool_call>"),
    "llama3_json": ToolFormat("<|python_tag|>", is_bare=True),
    "mistral": ToolFormat("[TOOL_CALLS]", is_named=True),
}


FORCED = ToolFormat("[", is_bare=True)
"""The format of calls that `tool_grammar` forces: an object, or a list of objects."""


def format_of(template: str) -> ToolFormat:
    """The format that a chat template shows to the model; `hermes` if it shows none."""
    # The templates of Llama 3.2 have no mark, but contain this instruction.
    if '{"name": function name, "parameters"' in template:
        return FORMATS["llama3_json"]
    found = (format for format in FORMATS.values() if format.begin in template)
    return next(found, FORMATS["hermes"])


@dataclass
class Found:
    """The text and the calls that became final with one piece of text."""

    text: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    """Each as in an answer of OpenAI."""


class ToolCallReader:
    """Separates the calls in one sequence from its text.

    Text is passed on at once, up to the first place where a call may begin. What follows is passed
    on when the sequence ends. Whatever looks like a call but is not valid is text, and calls may
    follow it. The result does not depend on how the text is cut into pieces.
    """

    def __init__(self, format: ToolFormat, tools: Collection[str]) -> None:
        """`tools` are the names of the tools. An object without a mark before it is a call only if
        it names one of them, because an ordinary answer may also be a JSON object."""
        self._format = format
        self._tools = tools
        self._held = ""
        self._is_inside = False
        """Whether `_held` begins with a call or a mark."""
        self._may_be_bare = format.is_bare

    def add(self, piece: str, *, is_end: bool = False) -> Found:
        """The text and the calls that are final after `piece`. With `is_end`, `piece` is the last
        one, and nothing is held back any more."""
        self._held += piece
        if is_end:
            return self._read_all()
        begin, start = self._format.begin, self._held.lstrip()
        if self._may_be_bare and (begin.startswith(start) or start.startswith("{")):
            return Found()
        self._may_be_bare = False
        if self._is_inside:
            return Found()
        text, mark, rest = self._held.partition(begin)
        self._is_inside = bool(mark)
        if not mark:
            kept = overlap(text, begin)
            text, rest = text[: len(text) - kept], text[len(text) - kept :]
        self._held = mark + rest
        return Found(text)

    def _read_all(self) -> Found:
        found, text, begin = Found(), self._held, self._format.begin
        at = 0
        if self._may_be_bare and text.lstrip().startswith("{"):
            at = self._read_calls(0, found)
        while (start := text.find(begin, at)) >= 0:
            stop = self._read_calls(start, found)
            if stop == start:  # no call follows, so the mark is text
                stop = start + len(begin)
                found.text += text[at:stop]
            else:
                found.text += text[at:start]
            at = stop
        found.text += text[at:]
        return found

    def _read_calls(self, start: int, found: Found) -> int:
        """Add the calls that begin at `start` to `found`. Returns where the text continues."""
        place = start
        while (before := self._format.before_object.match(self._held, place)) is not None:
            try:
                _, stop = _DECODER.raw_decode(self._held, before.end())
                found.calls.append(self._call(before, self._held[before.end() : stop]))
            except (ValueError, RecursionError):
                break
            place = stop
        after = self._format.after_calls.match(self._held, place)
        return after.end() if after is not None and place > start else start

    def _call(self, before: re.Match[str], text: str) -> dict[str, Any]:
        """The call with the JSON object `text`, after `before`. Raises ValueError if it is none."""
        content: Any = parse_object(text)
        name = before.groupdict().get("name")
        if name is None and content is not None:
            name = content.get("name")
            content = content.get("arguments", content.get("parameters", {}))
            if isinstance(content, str):  # some models write the arguments as JSON text already
                content = parse_object(content)
        is_bare = self._may_be_bare and not self._held[: before.end()].strip()
        if not isinstance(name, str) or (is_bare and name not in self._tools):
            raise ValueError("the call names no tool")
        if not isinstance(content, dict):
            raise ValueError("the arguments are no object")
        # A number that is too large raises ValueError here.
        arguments = json.dumps(content, ensure_ascii=False, allow_nan=False)
        call_id = secrets.token_hex(_NUM_ID_CHARACTERS)[:_NUM_ID_CHARACTERS]
        function = {"name": name, "arguments": arguments}
        return {"id": call_id, "type": "function", "function": function}


def tool_grammar(tools: list[Tool], *, is_list: bool) -> Grammar:
    """A grammar that allows nothing but one call of one of `tools`, in the form
    `{"name": …, "arguments": {…}}`. With `is_list`, it allows a list of one or more such calls.

    As in vLLM, a forced call is plain JSON. The chat template may show a different format, which
    the model uses for calls that are not forced.
    """
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool.function.name},
                "arguments": {"$ref": f"#/$defs/{number}"},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for number, tool in enumerate(tools)
    ]
    schema: dict[str, Any] = calls[0] if len(calls) == 1 else {"anyOf": calls}
    if is_list:
        schema = {"type": "array", "items": schema, "minItems": 1}
    arguments = {
        str(number): _with_root(tool.function.parameters or {"type": "object"}, f"#/$defs/{number}")
        for number, tool in enumerate(tools)
    }
    # Compact: small models can go on with whitespace until there are no tokens left.
    text = schema_text({**schema, "$defs": arguments}, whitespace_flexible=False)
    return Grammar(kind="json_schema", text=text, param="tool_choice")


def _with_root(schema: Any, root: str) -> Any:
    """`schema`, changed so that its references to its own parts are right when it stands at the
    place `root` of a larger schema."""
    if isinstance(schema, list):
        return [_with_root(each, root) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: root + value[1:]
        if name == "$ref" and isinstance(value, str) and value.startswith("#")
        else _with_root(value, root)
        for name, value in schema.items()
    }
