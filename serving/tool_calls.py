"""Finds calls of tools in the text of an answer, while the text arrives.

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
import string
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Literal

from serving.stop_strings import overlap

FormatName = Literal["hermes", "llama3_json", "mistral"]

_NUM_ID_CHARACTERS = 9
"""Mistral's templates refuse ids of another length, and ids that are not alphanumeric."""


@dataclass(frozen=True)
class ToolFormat:
    """How a model marks calls of tools in its text."""

    begin: str
    """The mark before calls."""
    end: str | None = None
    """The mark after calls, which text may follow. None if an answer ends with its calls."""
    is_bare: bool = False
    """Whether an answer may also begin with a call that has no mark `begin` before it."""


FORMATS: dict[FormatName, ToolFormat] = {
    "hermes": ToolFormat("<tool_call>", "</tool_call>"),
    "llama3_json": ToolFormat("<|python_tag|>", is_bare=True),
    "mistral": ToolFormat("[TOOL_CALLS]"),
}


FORCED = ToolFormat("[", is_bare=True)
"""The format of calls that `serving/tool_grammar.py` forces: an object, or a list of objects."""


def format_of(template: str) -> ToolFormat:
    """The format that a chat template shows to the model; `hermes` if it shows none."""
    # The templates of Llama 3.2 have no mark, but contain this instruction.
    if '{"name": function name, "parameters"' in template:
        return FORMATS["llama3_json"]
    found = (format for format in FORMATS.values() if format.begin in template)
    return next(found, FORMATS["hermes"])


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """One call of a tool by the model."""

    name: str
    arguments: str
    """The arguments as JSON text."""
    id: str

    @property
    def body(self) -> dict[str, Any]:
        """The call as in an answer of OpenAI."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass
class Found:
    """The text and the calls that became final with one piece of text."""

    text: str = ""
    calls: list[ToolCall] = field(default_factory=list)


class ToolCallReader:
    """Separates the calls in one sequence from its text.

    A call is passed on only when it is complete, because an incomplete one may still turn out to be
    text. Whatever looks like a call but is not valid is text.
    """

    def __init__(self, format: ToolFormat, names: Collection[str]) -> None:
        """`names` are the names of the tools. An object without a mark before it is a call only if
        it names one of these tools, because an ordinary answer may also be a JSON object."""
        self._format = format
        self._names = names
        self._held = ""
        """Text that may become a call."""
        self._is_inside = False
        """Whether `_held` begins with a call, or with the marks before a call."""
        self._object = _ObjectEnd()
        self._may_be_bare = format.is_bare
        """Whether the next object may be a call without a mark before it."""
        self._is_after_call = False
        """Whether there was no text since the last call."""

    def add(self, piece: str, *, is_end: bool = False) -> Found:
        """The text and the calls that are final after `piece`. With `is_end`, `piece` is the last
        one, and nothing is held back any more."""
        found = Found()
        self._held += piece
        while self._held and (self._read_call if self._is_inside else self._read_text)(found):
            pass
        if is_end:
            is_rest = self._is_after_call and not self._held.strip(" \n];")
            found.text += "" if is_rest else self._held
            self._held = ""
        return found

    def _read_text(self, found: Found) -> bool:
        """Move text from `_held` to `found`, up to the place where a call begins. Returns whether
        `_held` can be read further."""
        begin, start = self._format.begin, self._held.lstrip()
        if self._may_be_bare:
            if start.startswith("{"):
                self._is_inside = True
                return True
            if begin.startswith(start):
                return False
            self._may_be_bare = False
        text, mark, rest = self._held.partition(begin)
        if mark:
            # Keep the mark in `_held`: if no call follows, the mark is text.
            self._held, self._is_inside = mark + rest, True
        else:
            kept = overlap(text, begin)
            text, self._held = text[: len(text) - kept], text[len(text) - kept :]
        if self._is_after_call:  # models write line breaks between calls
            text = text.lstrip()
            self._is_after_call = not text
        found.text += text
        return bool(mark)

    def _read_call(self, found: Found) -> bool:
        """Move the call at the beginning of `_held` to `found`, without its marks. Returns whether
        `_held` can be read further."""
        before = _BEFORE_OBJECT.match(self._held)
        if before is None:
            end = self._format.end or ""
            rest = self._held.lstrip(" \n];")
            if end and rest.startswith(end):
                self._held, self._is_inside = rest.removeprefix(end), False
                return True
            if _INCOMPLETE.fullmatch(self._held) or end.startswith(rest):
                return False
            return self._give_up(found)
        stop = self._object.find(self._held, before.end() - 1)
        if stop is None:
            return False
        call = self._parse_call(self._held[before.end() - 1 : stop], before["name"])
        if call is None:
            return self._give_up(found)
        found.calls.append(call)
        self._is_after_call = True
        self._held, self._object, self._may_be_bare = self._held[stop:], _ObjectEnd(), False
        return True

    def _parse_call(self, text: str, name: str | None) -> ToolCall | None:
        try:
            content = json.loads(text)
        except ValueError:
            return None
        if name is None:
            arguments = content.get("arguments", content.get("parameters", {}))
            name = content.get("name")
        else:
            arguments = content
        is_tool = name in self._names or not self._may_be_bare
        if not isinstance(name, str) or not is_tool:
            return None
        if not isinstance(arguments, str):  # some models write the arguments as JSON text already
            arguments = json.dumps(arguments, ensure_ascii=False)
        return ToolCall(name=name, arguments=arguments, id=_new_id())

    def _give_up(self, found: Found) -> bool:
        """Pass all of `_held` on as text, because no call can begin there."""
        found.text += self._held
        self._held, self._object = "", _ObjectEnd()
        self._is_inside = self._may_be_bare = False
        return False


_MARKS = r"(?:\s|<tool_call>|<\|python_tag\|>|\[TOOL_CALLS\]|[\[\],;])*"
_BEFORE_OBJECT = re.compile(
    rf"{_MARKS}(?:(?P<name>[\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*)?\{{"
)
_INCOMPLETE = re.compile(rf"{_MARKS}[\w.-]*(?:\[[A-Z_]*)?(?:\]\w*(?:\[[A-Z]*\]?)?)?\s*")
"""Matches the beginning of a text that `_BEFORE_OBJECT` may match when more text arrives."""


class _ObjectEnd:
    """Finds the end of a JSON object in a text that grows. Looks at each character only once."""

    def __init__(self) -> None:
        self._place: int | None = None
        self._depth = 0
        self._is_string = self._is_escaped = False

    def find(self, text: str, start: int) -> int | None:
        """The index after the end of the object that begins at `start`; None if `text` does not
        contain its end yet."""
        place = start if self._place is None else self._place
        while place < len(text):
            character = text[place]
            place += 1
            if self._is_escaped:
                self._is_escaped = False
            elif self._is_string:
                self._is_escaped = character == "\\"
                self._is_string = character != '"'
            elif character == '"':
                self._is_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if not self._depth:
                    return place
        self._place = place
        return None


def _new_id() -> str:
    alphabet = string.ascii_letters + string.digits
    return "".join(secrets.choice(alphabet) for _ in range(_NUM_ID_CHARACTERS))
