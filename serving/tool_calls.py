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
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from pydantic_core import from_json

from serving.detokenizer import overlap
from serving.settings import FormatName

_NUM_ID_CHARACTERS = 9
"""Mistral's templates refuse ids of another length, and ids that are not alphanumeric."""
_SEPARATORS = string.whitespace + "[],;"
"""Models write these characters around the objects of their calls."""
_MAX_SEPARATORS = 100
"""At most this many separators and marks can stand before an object. Models write a few. Without a
limit, each new piece of text would be compared with all of them again."""
_MAX_PIECE = 4096
"""A longer piece of text is read in parts, because the rest of the text is copied after each mark
that is found."""


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
    def separators(self) -> re.Pattern[str]:
        """The marks and separators before an object."""
        return re.compile(rf"(?:{re.escape(self.begin)}|[\s\[\],;]){{0,{_MAX_SEPARATORS}}}")

    @cached_property
    def before_object(self) -> re.Pattern[str]:
        """The text before an object."""
        name = r"(?P<name>[\w.-]{1,64})(?:\[CALL_ID\]\w{1,64})?(?:\[ARGS\])?\s{0,9}"
        return re.compile(rf"{self.separators.pattern}(?:{name if self.is_named else ''})?(?=\{{)")

    @cached_property
    def incomplete(self) -> re.Pattern[str]:
        """Matches a whole text that `before_object` may match when more text arrives."""
        name, call_id, arguments = r"[\w.-]{1,64}", _characters("[CALL_ID]"), _characters("[ARGS]")
        ways = [_characters(self.begin)]
        if self.is_named:
            ways += [
                [name, *call_id, r"\w{1,64}", *arguments, r"\s{1,9}"],
                [name, *call_id, r"\w{1,64}", r"\s{1,9}"],
                [name, *arguments, r"\s{1,9}"],
                [name, r"\s{1,9}"],
            ]
        return re.compile(f"{self.separators.pattern}(?:{'|'.join(map(_beginning, ways))})")


def _characters(text: str) -> list[str]:
    return [re.escape(character) for character in text]


def _beginning(patterns: Iterable[str]) -> str:
    """A pattern for the beginnings of a text that consists of `patterns`."""
    found = ""
    for pattern in reversed(list(patterns)):
        found = f"(?:{pattern}{found})?"
    return found


FORMATS: dict[FormatName, ToolFormat] = {
    "hermes": ToolFormat("<tool_call>", "</tool_call>"),
    "llama3_json": ToolFormat("<|python_tag|>", is_bare=True),
    "mistral": ToolFormat("[TOOL_CALLS]", is_named=True),
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
    """The arguments as JSON text, as the model wrote it."""
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
    text. Whatever looks like a call but is not valid is text, and calls may follow it. The result
    does not depend on how the text is cut into pieces.
    """

    def __init__(self, format: ToolFormat, tools: Collection[str]) -> None:
        """`tools` are the names of the tools. An object without a mark before it is a call only if
        it names one of them, because an ordinary answer may also be a JSON object."""
        self._format = format
        self._tools = tools
        self._held = ""
        """Text that may become a call."""
        self._is_inside = False
        """Whether `_held` begins with a call, or with the marks before a call."""
        self._end = _ObjectEnd()
        self._may_be_bare = format.is_bare
        """Whether the next object may be a call without a mark before it."""
        self._dropped = ""
        """The characters that are not passed on if the next text begins with them, because they
        only separate it from the last call."""

    def add(self, piece: str, *, is_end: bool = False) -> Found:
        """The text and the calls that are final after `piece`. With `is_end`, `piece` is the last
        one, and nothing is held back any more."""
        found = Found()
        for start in range(0, len(piece), _MAX_PIECE):
            self._held += piece[start : start + _MAX_PIECE]
            while self._held and (self._read_call if self._is_inside else self._read_text)(found):
                pass
        if is_end:
            self._give_up(len(self._held), found)
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
        self._pass_on(text, found)
        return bool(mark)

    def _read_call(self, found: Found) -> bool:
        """Move the call at the beginning of `_held` to `found`, without its marks. Returns whether
        `_held` can be read further."""
        before = self._format.before_object.match(self._held)
        if before is None:
            end = self._format.end or ""
            rest = self._held.lstrip(_SEPARATORS)
            if end and rest.startswith(end):
                self._held, self._is_inside = rest.removeprefix(end), False
                self._dropped = string.whitespace
                return True
            if self._format.incomplete.fullmatch(self._held) or end.startswith(rest):
                return False
            separators = self._format.separators.match(self._held)
            return self._give_up(separators.end() if separators else 0, found)
        stop = self._end.find(self._held, before.end())
        if stop is None:
            return False
        name = before.groupdict().get("name")
        call = self._parse_call(self._held[before.end() : stop], name)
        if call is None:
            return self._give_up(stop, found)
        found.calls.append(call)
        self._held, self._end, self._may_be_bare = self._held[stop:], _ObjectEnd(), False
        self._dropped = _SEPARATORS
        return True

    def _parse_call(self, text: str, name: str | None) -> ToolCall | None:
        content, arguments = parse_object(text), text
        if content is None:
            return None
        if name is None:
            name, members = content.get("name"), _members(text)
            arguments = members.get("arguments", members.get("parameters", "{}"))
            if arguments.startswith('"'):  # some models write the arguments as JSON text already
                arguments = json.loads(arguments)
        if not isinstance(name, str) or (self._may_be_bare and name not in self._tools):
            return None
        if parse_object(arguments) is None:
            return None
        return ToolCall(name=name, arguments=arguments, id=_new_id())

    def _give_up(self, stop: int, found: Found) -> bool:
        """Pass the first `stop` characters of `_held` on as text, because they contain no call.
        Returns true: the rest can be read further."""
        self._pass_on(self._held[:stop], found)
        self._held, self._end = self._held[stop:], _ObjectEnd()
        self._is_inside = self._may_be_bare = False
        return True

    def _pass_on(self, text: str, found: Found) -> None:
        text = text.lstrip(self._dropped)
        if text:
            found.text += text
            self._dropped = ""


def parse_object(text: str) -> dict[str, Any] | None:
    """The JSON object in `text`. None if `text` is something else. Also None if a request could not
    contain the object either, for example because of NaN, half of a surrogate pair, or too many
    levels."""
    try:
        content = from_json(text, allow_inf_nan=False)
    except ValueError:
        return None
    return content if isinstance(content, dict) else None


def _members(text: str) -> dict[str, str]:
    """Name → value of each member of a JSON object. `text` must be a valid JSON object. Each value
    is the part of `text` that holds the value."""
    found: list[tuple[str, str]] = []
    place = _BETWEEN_VALUES.match(text, 1)
    while place is not None and place.end() < len(text) - 1:
        value, stop = _DECODER.raw_decode(text, place.end())
        found.append((value, text[place.end() : stop]))
        place = _BETWEEN_VALUES.match(text, stop)
    names, values = found[::2], found[1::2]
    return {name: part for (name, _), (_, part) in zip(names, values, strict=True)}


_BETWEEN_VALUES = re.compile(r"[\s:,]*")
_DECODER = json.JSONDecoder()


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
