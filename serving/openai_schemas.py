"""The request body of `/v1/completions`, and the fields that `/v1/chat/completions` has too.

The names, ranges and defaults of the fields come from OpenAI, or from vLLM if OpenAI does not have
the field. Unknown fields are ignored, as in vLLM. If OpenAI or vLLM knows a field that this server
does not support, the field causes an error (`serving/unsupported_fields.py`).
"""

from typing import Annotated, Any, get_args

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
)

from serving.constraints import Constraints
from serving.field_limits import MAX_ITEMS, MAX_TOKEN_IDS, FewItems
from serving.unsupported_fields import Unsupported, accept_only

MAX_LOGPROBS = 20
MAX_STOPS = 1024
MAX_ID_LENGTH = 256
MAX_TOKEN_ID_DIGITS = 18
MIN_SEED, MAX_SEED = -(2**63), 2**63 - 1

TokenId = Annotated[int, Field(ge=0)]
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


ModelName = Annotated[str | None, AfterValidator(lambda name: name or None)]
"""As in vLLM, an empty text means the same as null."""


class RequestBody(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", allow_inf_nan=False)

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


class StreamOptions(RequestBody):
    include_usage: bool = False
    continuous_usage_stats: Annotated[Any, accept_only(False)] = None


class SamplingRequest(RequestBody, Constraints, Unsupported):
    """The fields of both routes. The fields from `temperature` to `repetition_penalty` are None if
    the request does not set them; their defaults are in the release's generation_config.json."""

    model: ModelName = None
    n: int = Field(default=1, ge=1)
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: str | Annotated[list[str], FewItems] | None = None
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
    logit_bias: Annotated[dict[str, float], FewItems] | None = None
    ignore_eos: bool = False
    min_tokens: int = Field(default=0, ge=0)
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    request_id: str | None = Field(default=None, max_length=MAX_ID_LENGTH)
    """The `id` of the answer ends with this value, instead of with `X-Request-Id`."""
    user: str | None = None

    @field_validator("stop")
    @classmethod
    def _stops_are_few_and_not_empty(cls, stop: str | list[str] | None) -> str | list[str] | None:
        stops = [stop] if isinstance(stop, str) else stop or []
        if len(stops) > MAX_STOPS:
            raise ValueError(f"at most {MAX_STOPS} stop strings, not {len(stops)}")
        if "" in stops:
            raise ValueError("an empty stop string would end each answer before its first token")
        return stop

    @field_validator("logit_bias")
    @classmethod
    def _biases_are_of_token_ids(cls, bias: dict[str, float] | None) -> dict[str, float] | None:
        for token_id, value in (bias or {}).items():
            # Check the length too: Python refuses to read a number of more than 4,300 digits.
            if len(token_id) > MAX_TOKEN_ID_DIGITS:
                raise ValueError(f"{token_id[:MAX_TOKEN_ID_DIGITS]!r}… is not a token id")
            if not (token_id.isascii() and token_id.isdigit()):
                raise ValueError(f"{token_id!r} is not a token id")
            if not -100 <= value <= 100:
                raise ValueError(f"bias {value:g} of token {token_id} is not within -100 and 100")
        return bias

    @field_validator("stream_options")
    @classmethod
    def _options_need_a_stream(
        cls, options: StreamOptions | None, info: ValidationInfo
    ) -> StreamOptions | None:
        # If `stream` itself is wrong, it is not in `data`, and the client gets that error.
        if options is not None and not info.data.get("stream", True):
            raise ValueError("is only for requests with stream: true")
        return options

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings of the request."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def num_sequences(self) -> int:
        """How many sequences are generated for the request."""
        return self.n

    @property
    def includes_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class CompletionRequest(SamplingRequest):
    prompt: Prompt
    max_tokens: int = Field(default=16, ge=0)
    best_of: int | None = Field(default=None, ge=1)
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = False
    add_special_tokens: bool = True
    """Whether the tokenizer adds its special tokens to a prompt that is text."""
    suffix: str | None = None

    @field_validator("logprobs", mode="before")
    @classmethod
    def _false_means_no_logprobs(cls, logprobs: object) -> object:
        return None if logprobs is False else logprobs

    @field_validator("best_of")
    @classmethod
    def _best_of_covers_n(cls, best_of: int | None, info: ValidationInfo) -> int | None:
        if best_of is None or "n" not in info.data:
            return best_of
        n = info.data["n"]
        if best_of < n:
            raise ValueError(f"is less than n, which is {n}")
        if best_of > n and info.data.get("stream"):
            raise ValueError(
                "is more than n, which cannot be streamed: only at the end of all sequences the "
                "best ones are known"
            )
        return best_of

    @field_validator("suffix")
    @classmethod
    def _suffix_is_not_supported(cls, suffix: str | None) -> None:
        if suffix:
            raise ValueError(
                "is not supported: the models can only continue a text, not fill a gap before a "
                "suffix; leave it out"
            )

    @property
    def num_sequences(self) -> int:
        return len(self.prompts) * (self.best_of or self.n)

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """All prompts of the request: texts, or lists of token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt
