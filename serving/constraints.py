"""The fields of a request that constrain the text of its answer: OpenAI's `response_format` and
vLLM's `structured_outputs`."""

import functools
import json
import logging
import re
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import from_json

from serving.engine import Grammar, GrammarKind
from serving.field_limits import FewItems

logger = logging.getLogger(__name__)

MAX_GRAMMAR_CHARS = 2**17

Schema = dict[str, Any] | bool
_ANY_OBJECT: Schema = {"type": "object"}
_GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""The keywords of a JSON schema whose values are objects with names that the author chose."""
_DATA = ("const", "enum", "default", "examples")
"""The keywords of a JSON schema whose values are no schemas."""


class JsonSchema(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True)

    name: str = ""
    content: Schema | None = Field(default=None, alias="schema")
    strict: bool | None = None
    """Has no effect: the answer always follows the schema, as in vLLM."""


class ResponseFormat(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _fits_its_type(self) -> Self:
        if self.json_schema is not None and self.type != "json_schema":
            raise ValueError("json_schema is possible only with the type json_schema")
        if self.type == "json_schema" and (
            self.json_schema is None or self.json_schema.content is None
        ):
            raise ValueError("type json_schema needs json_schema.schema")
        _check(self.grammar)
        return self

    @functools.cached_property
    def grammar(self) -> Grammar | None:
        if self.type == "text":
            return None
        schema = None if self.json_schema is None else self.json_schema.content
        text = schema_text(_ANY_OBJECT if schema is None else schema)
        return Grammar(kind="json_schema", text=text, param="response_format")


class StructuredOutputs(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    json_: str | Schema | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], FewItems] | None = None
    grammar_: str | None = Field(default=None, alias="grammar")
    json_object: Literal[True] | None = None
    disable_any_whitespace: bool = False
    """If true, JSON has no whitespace between its values."""
    whitespace_pattern: str | None = None
    """A regular expression for the whitespace between the values of JSON."""
    disable_additional_properties: Literal[False] = False
    structural_tag: None = None

    @model_validator(mode="before")
    @classmethod
    def _has_few_fields(cls, value: object) -> object:
        # pydantic would make one error for each unknown field. There may be thousands, so refuse
        # them here.
        if isinstance(value, dict) and len(value) > len(cls.model_fields):
            raise ValueError(f"has {len(value)} fields; only {len(cls.model_fields)} are known")
        return value

    @model_validator(mode="after")
    def _has_one_constraint(self) -> Self:
        constraints = (self.json_, self.regex, self.choice, self.grammar_, self.json_object)
        if sum(each is not None for each in constraints) != 1:
            raise ValueError("needs exactly one of json, regex, choice, grammar and json_object")
        _check(self.grammar)
        return self

    @functools.cached_property
    def grammar(self) -> Grammar:
        kind: GrammarKind
        if self.regex is not None:
            kind, text = "regex", self.regex
        elif self.choice is not None:
            kind, text = "choice", json.dumps(self.choice)
        elif self.grammar_ is not None:
            kind, text = "grammar", _marked(self.grammar_)
        else:
            options: dict[str, Any] = {}
            if self.disable_any_whitespace:
                options = {"whitespace_flexible": False}
            elif self.whitespace_pattern is not None:
                options = {"whitespace_pattern": self.whitespace_pattern}
            schema = _ANY_OBJECT if self.json_ is None else self.json_
            kind, text = "json_schema", schema_text(schema, **options)
        return Grammar(kind=kind, text=text, param="structured_outputs")


class Constraints(BaseModel):
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    @field_validator("structured_outputs")
    @classmethod
    def _is_alone(
        cls, value: StructuredOutputs | None, info: ValidationInfo
    ) -> StructuredOutputs | None:
        other = info.data.get("response_format")
        if value is not None and other is not None and other.type != "text":
            raise ValueError("not possible together with response_format")
        return value

    @property
    def grammar(self) -> Grammar | None:
        """The form that the text of the answer must have; None if every text is allowed."""
        if self.structured_outputs is not None:
            return self.structured_outputs.grammar
        return None if self.response_format is None else self.response_format.grammar


def schema_text(schema: str | Schema, **options: Any) -> str:
    """The text of a grammar for JSON of this schema. `options` are llguidance's options for JSON,
    which every engine reads from the schema itself. Raises ValueError."""
    if isinstance(schema, str):
        schema = from_json(schema)
    if isinstance(schema, bool):
        return json.dumps(schema)
    if not isinstance(schema, dict):
        raise ValueError("a JSON schema is an object")
    whole = _without_unique_items(schema)
    return json.dumps({**whole, "x-guidance": options} if options else whole)


def _without_unique_items(schema: Any) -> Any:
    """`schema` without `uniqueItems`, which no engine can check. pydantic writes this keyword for
    each `set`."""
    if isinstance(schema, list):
        return [_without_unique_items(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {}
    for name, value in schema.items():
        if name == "uniqueItems" and isinstance(value, bool):
            _warn_of_unique_items()
        elif name in _MAPS and isinstance(value, dict):
            found[name] = {key: _without_unique_items(each) for key, each in value.items()}
        else:
            found[name] = value if name in _DATA else _without_unique_items(value)
    return found


@functools.cache
def _warn_of_unique_items() -> None:
    """Writes to the log, once."""
    logger.warning("uniqueItems in a JSON schema is ignored: an answer may repeat items of a list")


def _marked(grammar: str) -> str:
    """`grammar`, with a mark for llguidance if its notation is Lark. Without the mark, llguidance
    takes a grammar for GBNF if its first rule is not written as `start:`."""
    is_marked = "%llguidance" in grammar or not grammar.strip()
    return grammar if is_marked or _GBNF_RULE.search(grammar) else "%llguidance {}\n" + grammar


def _check(grammar: Grammar | None) -> None:
    if grammar is None:
        return
    if len(grammar.text) > MAX_GRAMMAR_CHARS:
        raise ValueError(
            f"has {len(grammar.text)} characters; at most {MAX_GRAMMAR_CHARS} are possible"
        )
    if grammar.kind != "regex" and not grammar.text.strip(" \n[]"):
        raise ValueError("is empty")
