"""Finds calls of tools in the text of an answer, while it arrives.

There is no common format: each family of models writes what its chat template taught it. A format
is named as vLLM's option `--tool-call-parser` names it
(https://docs.vllm.ai/en/stable/features/tool_calling.html):

`hermes`      `<tool_call>{"name": …, "arguments": {…}}</tool_call>`; Qwen 2.5 and 3 too. SmolLM2
              writes a list of such objects between one pair of tags.
`llama3_json` the answer is `{"name": …, "parameters": {…}}`, perhaps after `<|python_tag|>`; a
              semicolon stands between two.
`mistral`     `[TOOL_CALLS][{"name": …, "arguments": {…}}]`, or in later models
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
    begin: str
    """Calls stand behind it."""
    end: str | None = None
    """Text goes on behind it; None where calls are the last of an answer."""
    is_bare: bool = False
    """Whether an answer may also be a call from its first character on, without `begin`."""


FORMATS: dict[FormatName, ToolFormat] = {
    "hermes": ToolFormat("<tool_call>", "</tool_call>"),
    "llama3_json": ToolFormat("<|python_tag|>", is_bare=True),
    "mistral": ToolFormat("[TOOL_CALLS]"),
}


FORCED = ToolFormat("[", is_bare=True)
"""Of calls that `serving/tool_grammar.py` forces: an object, or a list of objects."""


def format_of(template: str) -> ToolFormat:
    """The format that a chat template shows to its model; `hermes` where it shows none."""
    # Templates of Llama 3.2 have no tag, but ask for exactly this.
    if '{"name": function name, "parameters"' in template:
        return FORMATS["llama3_json"]
    found = (format for format in FORMATS.values() if format.begin in template)
    return next(found, FORMATS["hermes"])


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    name: str
    arguments: str
    """JSON text."""
    id: str

    @property
    def body(self) -> dict[str, Any]:
        """As OpenAI writes it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass
class Found:
    """What is certain of a piece of text."""

    text: str = ""
    calls: list[ToolCall] = field(default_factory=list)


class ToolCallReader:
    """Separates the calls in one sequence from its text.

    A call is given out when it is whole, because only then it is seen to be one. What looks like a
    call and is none is text.
    """

    def __init__(self, format: ToolFormat, names: Collection[str]) -> None:
        """`names` are those of the tools. A bare object is a call only if it names one of them: an
        answer that is JSON begins in the same way."""
        self._format = format
        self._names = names
        self._held = ""
        """Text that may become a call."""
        self._is_inside = False
        """Whether `_held` begins with a call, or with marks before one."""
        self._object = _ObjectEnd()
        self._may_be_bare = format.is_bare
        self._is_after_call = False

    def add(self, piece: str, *, is_end: bool = False) -> Found:
        """What is certain after `piece`; with `is_end`, all that was held back too."""
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
        """Up to where calls begin. Whether there is more to read."""
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
            # The mark stays, so that it is text if no call follows.
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
        """The call that `_held` begins with, behind its marks. Whether there is more to read."""
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
        call = self._call_in(self._held[before.end() - 1 : stop], before["name"])
        if call is None:
            return self._give_up(found)
        found.calls.append(call)
        self._is_after_call = True
        self._held, self._object, self._may_be_bare = self._held[stop:], _ObjectEnd(), False
        return True

    def _call_in(self, text: str, name: str | None) -> ToolCall | None:
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
        if not isinstance(arguments, str):  # some models write JSON text here, as OpenAI does
            arguments = json.dumps(arguments, ensure_ascii=False)
        return ToolCall(name=name, arguments=arguments, id=_new_id())

    def _give_up(self, found: Found) -> bool:
        """No call can be read from here on: it is text."""
        found.text += self._held
        self._held, self._object = "", _ObjectEnd()
        self._is_inside = self._may_be_bare = False
        return False


_MARKS = r"(?:\s|<tool_call>|<\|python_tag\|>|\[TOOL_CALLS\]|[\[\],;])*"
_BEFORE_OBJECT = re.compile(
    rf"{_MARKS}(?:(?P<name>[\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*)?\{{"
)
_INCOMPLETE = re.compile(rf"{_MARKS}[\w.-]*(?:\[[A-Z_]*)?(?:\]\w*(?:\[[A-Z]*\]?)?)?\s*")
"""What may go on to be the text before an object."""


class _ObjectEnd:
    """Finds where a JSON object ends in a text that grows. Each character is looked at once."""

    def __init__(self) -> None:
        self._place: int | None = None
        self._depth = 0
        self._is_string = self._is_escaped = False

    def find(self, text: str, start: int) -> int | None:
        """The place behind the object that begins at `start`; None while it has no end."""
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
