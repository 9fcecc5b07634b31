"""The fields of a request that constrain the text of its answer: OpenAI's `response_format`, vLLM's
`structured_outputs`, and the older fields `guided_*` of vLLM."""

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from serving.engine import Grammar, GrammarKind
from serving.field_limits import FewItems

MAX_GRAMMAR_CHARS = 2**17
_GUIDED: dict[str, GrammarKind] = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
FIELDS = ("response_format", "structured_outputs", *_GUIDED)

Schema = str | dict[str, Any] | bool
Choice = Annotated[list[str], FewItems]


class JsonSchema(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True)

    name: str = ""
    content: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None
    """Has no effect: the answer always follows the schema, as in vLLM."""


class ResponseFormat(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @field_validator("json_schema")
    @classmethod
    def _belongs_to_its_type(
        cls, schema: JsonSchema | None, info: ValidationInfo
    ) -> JsonSchema | None:
        if schema is not None and info.data.get("type") not in ("json_schema", None):
            raise ValueError("is possible only with the type json_schema")
        return schema


class StructuredOutputs(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    json_: Schema | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Choice | None = None
    grammar: str | None = None
    json_object: Literal[True] | None = None
    disable_any_whitespace: Literal[False] = False
    disable_additional_properties: Literal[False] = False
    whitespace_pattern: None = None
    structural_tag: None = None

    @model_validator(mode="before")
    @classmethod
    def _has_few_fields(cls, value: object) -> object:
        # pydantic would make one error for each unknown field. There may be thousands, so refuse
        # them here.
        if isinstance(value, dict) and len(value) > len(cls.model_fields):
            raise ValueError(f"has {len(value)} fields; only {len(cls.model_fields)} are known")
        return value


class Constraints(BaseModel):
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Choice | None = None
    guided_grammar: str | None = None

    @field_validator(*FIELDS)
    @classmethod
    def _check_constraint(cls, value: object, info: ValidationInfo) -> object:
        found = _grammars(info.field_name or "", value)
        if len(found) > 1:
            raise ValueError(f"only one of {', '.join(each.kind for each in found)} is possible")
        if isinstance(value, StructuredOutputs) and not found:
            raise ValueError("needs one of json, regex, choice, grammar and json_object")
        others = [name for name in FIELDS if _grammars(name, info.data.get(name))]
        if found and others:
            raise ValueError(f"not possible together with {others[0]}")
        for each in found:
            if len(each.text) > MAX_GRAMMAR_CHARS:
                raise ValueError(
                    f"has {len(each.text)} characters; at most {MAX_GRAMMAR_CHARS} are possible"
                )
            if each.kind not in ("json_object", "regex") and not each.text.strip(" \n[]"):
                raise ValueError("is empty")
        if isinstance(value, ResponseFormat) and not found and value.type != "text":
            raise ValueError("type json_schema needs json_schema.schema")
        return value

    @property
    def grammar(self) -> Grammar | None:
        """The form that the text of the answer must have; None if every text is allowed."""
        found = (grammar for name in FIELDS for grammar in _grammars(name, getattr(self, name)))
        return next(found, None)


def _grammars(param: str, value: Any) -> list[Grammar]:
    """All constraints in the value of one field. A valid field has at most one."""
    given: dict[GrammarKind, Any]
    if isinstance(value, ResponseFormat):
        given = {
            "json_schema": None if value.json_schema is None else value.json_schema.content,
            "json_object": "" if value.type == "json_object" else None,
        }
    elif isinstance(value, StructuredOutputs):
        given = {
            "json_schema": value.json_,
            "json_object": "" if value.json_object else None,
            "regex": value.regex,
            "choice": value.choice,
            "grammar": value.grammar,
        }
    else:
        given = {_GUIDED[param]: value} if param in _GUIDED else {}
    return [
        Grammar(kind=kind, text=each if isinstance(each, str) else json.dumps(each), param=param)
        for kind, each in given.items()
        if each is not None
    ]
