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

MAX_DEPTH = 100
"""How many schemas inside one another are read, references included. What is deeper names no
type."""

ParameterTypes = Mapping[str, set[str]]
"""Name of a parameter → the types of JSON values that it may have."""


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
    """The types that the JSON schema of a tool's arguments allows for each parameter. If nothing
    says the type of a parameter, it may be a string."""
    properties = (schema or {}).get("properties")
    if not isinstance(properties, dict):
        return {}
    known: dict[str, set[str]] = {}
    return {name: _types(each, schema, known, 0) or {"string"} for name, each in properties.items()}


def _types(schema: Any, whole: Any, known: dict[str, set[str]], depth: int) -> set[str]:
    """The types that `schema` names; empty if it names none. `whole` is the schema that it is a
    part of, and `known` the types of each reference. Each reference is followed only once:
    definitions that refer to each other have a number of paths that grows like a factorial. So in a
    circle of references, a reference may get fewer types than the circle names."""
    if not isinstance(schema, dict) or depth == MAX_DEPTH:
        return set()
    depth += 1
    found = {each for each in _listed(schema.get("type")) if isinstance(each, str)}
    found.update(map(_type_of, _listed(schema.get("enum", []))))
    if "const" in schema:
        found.add(_type_of(schema["const"]))
    reference = schema.get("$ref")
    if isinstance(reference, str):
        if reference not in known:
            known[reference] = set()  # for a reference that leads back to itself
            known[reference] = _types(_referred(whole, reference), whole, known, depth)
        found |= known[reference]
    for each in _listed(schema.get("allOf", [])):
        found |= _types(each, whole, known, depth)
    for kind in ("anyOf", "oneOf"):
        for each in _listed(schema.get(kind, [])):
            found |= _types(each, whole, known, depth) or {"string"}
    return found


def _referred(whole: Any, reference: str) -> Any:
    """The part of a schema that a reference such as `#/$defs/Size` means; None if there is none."""
    for name in reference.removeprefix("#/").split("/"):
        whole = whole.get(name) if isinstance(whole, dict) else None
    return whole


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _type_of(value: Any) -> str:
    """`string`, `null`, or `number` for all other values, because nothing else matters here."""
    return "null" if value is None else "string" if isinstance(value, str) else "number"


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
