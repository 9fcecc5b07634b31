"""What `/v1/completions` and `/v1/chat/completions` take.

Names, ranges and defaults are OpenAI's, and vLLM's for what OpenAI does not have. Fields that
nobody here knows are ignored, as vLLM does; fields that are known and not supported are errors.
"""

from typing import Annotated, Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
)

MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_TOKEN_ID_DIGITS = 18
MIN_SEED, MAX_SEED = -(2**63), 2**63 - 1

TokenId = Annotated[int, Field(ge=0)]
# fail_fast: a million wrong ids are one error, and not a million.
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]


def _check_prompt(value: object, check: ValidatorFunctionWrapHandler) -> object:
    try:
        return check(value)
    except ValidationError:
        raise ValueError(
            "must be a string, a list of strings, a list of token ids, or a list of such lists, "
            "none of the lists empty"
        ) from None


Prompt = Annotated[
    str
    | Annotated[TokenIds, Field(min_length=1)]
    | Annotated[list[str], Field(min_length=1, fail_fast=True)]
    | Annotated[
        list[Annotated[TokenIds, Field(min_length=1)]], Field(min_length=1, fail_fast=True)
    ],
    Field(union_mode="left_to_right"),
    WrapValidator(_check_prompt),
]


class StreamOptions(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True)

    include_usage: bool = False


class SamplingRequest(BaseModel):
    """What both routes take. Of what is null, from `temperature` to `repetition_penalty`, the
    release's generation_config.json says the default."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", allow_inf_nan=False)

    model: str | None = None
    n: int = Field(default=1, ge=1)
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    stop_token_ids: TokenIds = []
    seed: int | None = Field(default=None, ge=MIN_SEED, le=MAX_SEED)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    """0 and -1 mean no limit."""
    min_p: float | None = Field(default=None, ge=0, le=1)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, gt=0, le=10)
    logit_bias: dict[str, float] | None = None
    ignore_eos: bool = False
    min_tokens: int = Field(default=0, ge=0)
    user: str | None = None

    @field_validator(
        "n", "stream", "stop_token_ids", "temperature", "top_p", "top_k", "min_p",
        "presence_penalty", "frequency_penalty", "repetition_penalty", "ignore_eos", "min_tokens",
        mode="before",
    )  # fmt: skip
    @classmethod
    def _null_means_the_default(cls, value: object, info: Any) -> object:
        return cls.model_fields[info.field_name].default if value is None else value

    @field_validator("stop")
    @classmethod
    def _stops_are_few_and_not_empty(cls, stop: str | list[str] | None) -> str | list[str] | None:
        stops = [stop] if isinstance(stop, str) else stop or []
        if len(stops) > MAX_STOPS:
            raise ValueError(f"at most {MAX_STOPS} stop strings, not {len(stops)}")
        if "" in stops:
            raise ValueError("an empty stop string would end everything before it begins")
        return stop

    @field_validator("logit_bias")
    @classmethod
    def _biases_are_of_token_ids(cls, bias: dict[str, float] | None) -> dict[str, float] | None:
        for token_id, value in (bias or {}).items():
            # Python reads no number of more than some thousand digits.
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
        # A field that is wrong itself is not in `data`.
        if options is not None and not info.data.get("stream", True):
            raise ValueError("only for requests with stream: true")
        return options

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(SamplingRequest):
    prompt: Prompt
    max_tokens: int | None = Field(default=16, ge=0)
    """null takes what the context has left."""
    best_of: int | None = Field(default=None, ge=1)
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = False
    suffix: str | None = None

    @field_validator("best_of")
    @classmethod
    def _best_of_covers_n(cls, best_of: int | None, info: ValidationInfo) -> int | None:
        if best_of is None or "n" not in info.data:
            return best_of
        n = info.data["n"]
        if best_of < n:
            raise ValueError(f"less than n, which is {n}")
        if best_of > n and info.data.get("stream"):
            raise ValueError("more than n cannot be streamed: which is best shows at the end")
        return best_of

    @field_validator("suffix")
    @classmethod
    def _suffix_is_not_supported(cls, suffix: str | None) -> None:
        if suffix:
            raise ValueError("these models continue a text and do not fill a gap; leave it out")

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt


class ChatMessage(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="allow")

    role: str
    content: str | list[dict[str, Any]] | None = None

    @field_validator("content")
    @classmethod
    def _parts_are_text(cls, content: str | list[dict[str, Any]] | None) -> str | None:
        if not isinstance(content, list):
            return content
        for part in content:
            if part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise ValueError(f"content part {part.get('type')!r}: only text is supported")
        return "".join(part["text"] for part in content)


class ChatRequest(SamplingRequest):
    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    tools: list[Any] | None = None
    functions: list[Any] | None = None
    response_format: dict[str, Any] | None = None

    @field_validator("top_logprobs")
    @classmethod
    def _top_logprobs_are_of_logprobs(cls, number: int | None, info: ValidationInfo) -> int | None:
        if number is not None and not info.data.get("logprobs", True):
            raise ValueError("needs logprobs: true")
        return number

    @field_validator("tools", "functions")
    @classmethod
    def _tools_are_not_supported(cls, tools: list[Any] | None) -> list[Any] | None:
        if tools:
            raise ValueError("not supported; leave them out")
        return tools

    @field_validator("response_format")
    @classmethod
    def _a_response_is_text(cls, format: dict[str, Any] | None) -> dict[str, Any] | None:
        if format and format.get("type") != "text":
            raise ValueError("only text is supported")
        return format
