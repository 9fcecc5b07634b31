"""Reads the arguments of a call that Qwen3-Coder writes as XML:

`<parameter=city>Wien</parameter><parameter=days>3</parameter></function>`

The model writes a newline before and after each value, which is not a part of the value. XML does
not tell the text `3` from the number 3, so the tool's JSON schema decides.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from pydantic_core import from_json

_END = "</function>"
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]{1,256})>(.*)", re.DOTALL)
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
"""Chat templates show these values of earlier calls to the model as Python writes them."""

ParameterTypes = Mapping[str, set[str]]
"""Name of a parameter → the types of JSON values that it may have; none if they are not known."""


class FunctionEnd:
    """Finds the end of a call in a text that grows. Looks at each character only once."""

    def __init__(self) -> None:
        self._place = 0

    def find(self, text: str, start: int) -> int | None:
        """The index after the call whose parameters begin at `start`; None if `text` does not
        contain its end yet."""
        place = text.find(_END, max(start, self._place))
        self._place = len(text) - len(_END) + 1
        return None if place < 0 else place + len(_END)


def parameter_types(schema: Mapping[str, Any] | None) -> ParameterTypes:
    """The types that the JSON schema of a tool's arguments names for each parameter."""
    properties = (schema or {}).get("properties")
    if not isinstance(properties, dict):
        return {}
    return {name: _types(each) for name, each in properties.items()}


def _types(schema: Any) -> set[str]:
    if not isinstance(schema, dict):
        return set()
    named = schema.get("type")
    found = {each for each in (named if isinstance(named, list) else [named]) if type(each) is str}
    for kind in ("anyOf", "oneOf", "allOf"):
        if isinstance(alternatives := schema.get(kind), list):
            found.update(*map(_types, alternatives))
    return found


def xml_arguments(text: str, types: ParameterTypes) -> str:
    """The arguments in `text` as a JSON object. An empty text if `text` is something else."""
    *parameters, rest = text.removesuffix(_END).split("</parameter>")
    matches = [_PARAMETER.fullmatch(each) for each in parameters]
    if rest.strip() or None in matches:
        return ""
    values = {match[1]: _value(match[2], types.get(match[1], set())) for match in matches if match}
    return "{" + ", ".join(f"{json.dumps(name)}: {value}" for name, value in values.items()) + "}"


def _value(text: str, types: set[str]) -> str:
    """A value as JSON text. It is a string if the parameter may be one, or if it is not JSON."""
    text = text.removeprefix("\n").removesuffix("\n")
    word = _PYTHON_WORDS.get(text, text)
    if "string" not in types or (word == "null" and "null" in types):
        try:
            from_json(word, allow_inf_nan=False)
        except ValueError:
            pass
        else:
            return word
    return json.dumps(text, ensure_ascii=False)
