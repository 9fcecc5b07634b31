"""The request body of `/v1/completions`, and the fields that `/v1/chat/completions` has too.

The names, ranges and defaults of the fields come from OpenAI, or from vLLM if OpenAI does not have
the field. Unknown fields are ignored, as in vLLM. If OpenAI or vLLM knows a field that this server
does not support (`UNSUPPORTED`), a client may send it with a value that changes nothing, because
many clients send default values. Any other value is an error, because an answer that ignores the
field would be wrong.

The validation of each list ends at its first wrong item (`fail_fast`), and no list may be longer
than its limit. Otherwise a body of 8 MiB could contain half a million wrong items, and pydantic
would make an error for each, which takes minutes and gigabytes. A dict whose values may have any
type needs no limit, because none of its values is wrong.
"""

import functools
import json
import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
    model_validator,
)
from pydantic_core import from_json

from serving.engine import Grammar, GrammarKind
from serving.request_errors import invalid

MAX_ITEMS = 2**14
MAX_TOKEN_IDS = 2**19
MAX_LOGPROBS = 20
MAX_STOPS = 1024
MIN_SEED, MAX_SEED = -(2**63), 2**63 - 1
MAX_GRAMMAR_CHARS = 2**17

Schema = dict[str, Any] | bool
_ANY_OBJECT: Schema = {"type": "object"}
_GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)

UNSUPPORTED: Mapping[str, object] = {
    **dict.fromkeys(("bad_words", "cache_salt", "ec_transfer_params", "kv_transfer_params")),
    **dict.fromkeys(("guided_choice", "guided_decoding_backend", "guided_grammar", "guided_json")),
    **dict.fromkeys(("guided_json_object", "guided_regex", "guided_whitespace_pattern")),
    **dict.fromkeys(("logits_processors", "logprob_token_ids", "prompt_embeds", "prompt_logprobs")),
    **dict.fromkeys(("repetition_detection", "thinking_token_budget", "truncate_prompt_tokens")),
    **dict.fromkeys(("return_prompt_text", "return_token_ids", "return_token_offsets"), False),
    **dict.fromkeys(("return_tokens_as_token_ids", "use_beam_search", "watermarking"), False),
    "priority": 0,
    "spaces_between_special_tokens": True,
    "vllm_xargs": None,
}
"""The fields that no route supports, each with the value that changes nothing. Null and empty
texts, lists and objects change nothing either."""

FewItems = Field(max_length=MAX_ITEMS, fail_fast=True)
TokenId = Annotated[int, Field(ge=0)]
BiasedToken = Annotated[int, Field(strict=False, ge=0)]
"""JSON writes the keys of an object as text."""
Bias = Annotated[float, Field(ge=-100, le=100)]
SAMPLING_FIELDS = {
    *("temperature", "top_p", "top_k", "min_p"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
}
"""The fields whose names and meaning are those of `Generation`."""
TokenIds = Annotated[list[TokenId], Field(max_length=MAX_TOKEN_IDS, fail_fast=True)]
Prompts = Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)


def _check_prompt(value: object, check: ValidatorFunctionWrapHandler) -> object:
    try:
        return check(value)
    except ValidationError:
        raise ValueError(
            "must be a string, a list of strings, a list of token ids, or a list of lists of token "
            f"ids; a list must not be empty, and have at most {MAX_ITEMS} prompts or "
            f"{MAX_TOKEN_IDS} token ids"
        ) from None


Prompt = Annotated[
    str
    | Annotated[TokenIds, Field(min_length=1)]
    | Annotated[list[str], Prompts]
    | Annotated[list[Annotated[TokenIds, Field(min_length=1)]], Prompts],
    Field(union_mode="left_to_right"),
    WrapValidator(_check_prompt),
]


Stop = Annotated[str, Field(min_length=1)]
"""An empty stop string would end each answer before its first token."""
ModelName = Annotated[str | None, AfterValidator(lambda name: name or None)]
"""As in vLLM, an empty text means the same as null."""


class RequestBody(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", allow_inf_nan=False)

    unsupported: ClassVar[Mapping[str, object]] = {}
    """As `UNSUPPORTED`, for the fields of this body."""

    @model_validator(mode="before")
    @classmethod
    def _is_supported(cls, body: Any) -> Any:
        for name, neutral in cls.unsupported.items() if isinstance(body, dict) else ():
            if body.get(name) not in (None, "", [], {}, neutral):
                raise invalid(name, "not supported here; leave it out")
        return body

    @field_validator("*", mode="before")
    @classmethod
    def _null_means_the_default(cls, value: object, info: ValidationInfo) -> object:
        # JSON does not distinguish 5 from 5.0, and some clients write integers as 5.0.
        if isinstance(value, float) and value.is_integer():
            return int(value)
        if value is not None or info.field_name is None:
            return value
        field = cls.model_fields[info.field_name]
        may_be_null = type(None) in get_args(field.annotation)
        return None if may_be_null or field.is_required() else field.default


class Part(BaseModel):
    """An object in a request body."""

    model_config = ConfigDict(frozen=True, strict=True)


class ResponseFormat(Part):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _fits_its_type(self) -> Self:
        if (self._schema is not None) != (self.type == "json_schema"):
            raise ValueError(
                "type json_schema needs json_schema.schema, and no other type may have it"
            )
        return self

    @functools.cached_property
    def grammar(self) -> Grammar | None:
        """The form that the text of the answer must have; None if every text is allowed. Raises
        RequestError."""
        if self.type == "text":
            return None
        schema = _ANY_OBJECT if self._schema is None else self._schema
        return json_grammar(schema, "response_format")

    @property
    def _schema(self) -> Any:
        return (self.json_schema or {}).get("schema")


class StructuredOutputs(Part):
    json_: str | Schema | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1), FewItems] | None = None
    grammar_: str | None = Field(default=None, alias="grammar")
    json_object: Literal[True] | None = None
    disable_any_whitespace: bool = False
    """If true, JSON has no whitespace between its values."""
    whitespace_pattern: str | None = None
    """A regular expression for the whitespace between the values of JSON."""
    disable_additional_properties: Literal[False] = False
    structural_tag: None = None

    @model_validator(mode="after")
    def _has_one_constraint(self) -> Self:
        constraints = (self.json_, self.regex, self.choice, self.grammar_, self.json_object)
        if sum(each is not None for each in constraints) != 1:
            raise ValueError("needs exactly one of json, regex, choice, grammar and json_object")
        return self

    @functools.cached_property
    def grammar(self) -> Grammar:
        """Raises RequestError."""
        param = "structured_outputs"
        if self.regex is not None:
            return _grammar("regex", self.regex, param)
        if self.choice is not None:
            return _grammar("choice", json.dumps(self.choice), param)
        if self.grammar_ is not None:
            return _grammar("grammar", _marked(self.grammar_), param)
        options: dict[str, Any] = {}
        if self.disable_any_whitespace:
            options = {"whitespace_flexible": False}
        elif self.whitespace_pattern is not None:
            options = {"whitespace_pattern": self.whitespace_pattern}
        schema = _ANY_OBJECT if self.json_ is None else self.json_
        return json_grammar(schema, param, **options)


def json_grammar(schema: Any, param: str, **options: Any) -> Grammar:
    """A grammar for JSON of this schema, which may also be the JSON text of a schema. `options` are
    llguidance's options for JSON, which every engine reads from the schema itself. Raises
    RequestError."""
    try:
        found = from_json(schema) if isinstance(schema, str) else schema
    except ValueError as error:
        raise invalid(param, f"the JSON schema is not JSON: {error}") from None
    if isinstance(found, dict):
        found = json.loads(json.dumps(found), object_hook=_without_unique_items)
        found |= {"x-guidance": options} if options else {}
    elif not isinstance(found, bool):
        raise invalid(param, "a JSON schema is an object")
    return _grammar("json_schema", json.dumps(found), param)


def _grammar(kind: GrammarKind, text: str, param: str) -> Grammar:
    if len(text) > MAX_GRAMMAR_CHARS:
        reason = f"has {len(text)} characters; at most {MAX_GRAMMAR_CHARS} are possible"
        raise invalid(param, reason)
    return Grammar(kind=kind, text=text, param=param)


def _without_unique_items(part: dict[str, Any]) -> dict[str, Any]:
    """An object in a schema, without the keyword `uniqueItems`, which no engine can check. pydantic
    writes this keyword for each `set`. A property or an enum's value of this name goes too if it is
    a boolean."""
    if isinstance(part.get("uniqueItems"), bool):
        del part["uniqueItems"]
    return part


def _marked(grammar: str) -> str:
    """`grammar`, with a mark for llguidance if its notation is Lark. Without the mark, llguidance
    takes a grammar for GBNF if its first rule is not written as `start:`."""
    is_marked = "%llguidance" in grammar or not grammar.strip()
    return grammar if is_marked or _GBNF_RULE.search(grammar) else "%llguidance {}\n" + grammar


class StreamOptions(RequestBody):
    unsupported: ClassVar[Mapping[str, object]] = {"continuous_usage_stats": False}

    include_usage: bool = False


class SamplingRequest(RequestBody):
    """The fields of both routes. `SAMPLING_FIELDS` are None if the request does not set them; their
    defaults are in the release's generation_config.json."""

    unsupported: ClassVar[Mapping[str, object]] = UNSUPPORTED
    is_chat: ClassVar[bool] = False

    model: ModelName = None
    max_tokens: int | None = None
    n: int = Field(default=1, ge=1)
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[TokenId], FewItems] = []
    allowed_token_ids: Annotated[TokenIds, Field(min_length=1)] | None = None
    """The only tokens that may be generated; null allows all."""
    seed: int | None = Field(default=None, ge=MIN_SEED, le=MAX_SEED)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    """0 and -1 mean that there is no limit."""
    min_p: float | None = Field(default=None, ge=0, le=1)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, gt=0, le=10)
    logit_bias: Annotated[dict[BiasedToken, Bias], FewItems] | None = None
    ignore_eos: bool = False
    min_tokens: int = Field(default=0, ge=0)
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings of the request."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def num_sequences(self) -> int:
        """How many sequences are generated for the request."""
        return self.n

    @property
    def grammar(self) -> Grammar | None:
        """The form that the text of the answer must have; None if every text is allowed. Raises
        RequestError."""
        given = (self.response_format, self.structured_outputs)
        found = [grammar for each in given if each and (grammar := each.grammar)]
        if len(found) > 1:
            raise invalid("structured_outputs", "not possible together with response_format")
        return next(iter(found), None)

    @property
    def max_tokens_field(self) -> tuple[str, int | None]:
        """The field that limits the number of new tokens, and its value."""
        return "max_tokens", self.max_tokens

    @property
    @abstractmethod
    def num_logprobs(self) -> int | None:
        """As in `Generation`."""

    @property
    def num_prompt_logprobs(self) -> int | None:
        """As in `Generation`."""
        return None


class CompletionRequest(SamplingRequest):
    unsupported: ClassVar[Mapping[str, object]] = {**UNSUPPORTED, "best_of": 1, "suffix": None}

    prompt: Prompt
    max_tokens: int = Field(default=16, ge=0)
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = False
    add_special_tokens: bool = True
    """Whether the tokenizer adds its special tokens to a prompt that is text."""

    @field_validator("logprobs", mode="before")
    @classmethod
    def _false_means_no_logprobs(cls, logprobs: object) -> object:
        return None if logprobs is False else logprobs

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        return self.logprobs if self.echo else None

    @property
    def num_sequences(self) -> int:
        return len(self.prompts) * self.n

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """All prompts of the request: texts, or lists of token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt
