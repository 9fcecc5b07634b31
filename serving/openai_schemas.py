"""What `/v1/completions` and `/v1/chat/completions` take.

Names, ranges and defaults are OpenAI's, and vLLM's for what OpenAI does not have. Fields that
nobody here knows are ignored, as vLLM does; fields that are known and not supported are errors.
"""

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

MAX_LOGPROBS = 20
MAX_STOPS = 16

TokenId = Annotated[int, Field(ge=0)]
Prompt = str | list[int] | list[str] | list[list[int]]


def _check_prompt(value: object) -> object:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value:
        if all(isinstance(each, str) for each in value) or _are_token_ids(value):
            return value
        if all(isinstance(each, list) and each and _are_token_ids(each) for each in value):
            return value
    raise ValueError(
        "must be a string, a list of strings, a list of token ids, or a list of such lists, "
        "none of the lists empty"
    )


def _are_token_ids(value: list[Any]) -> bool:
    return all(type(each) is int and each >= 0 for each in value)


class StreamOptions(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True)

    include_usage: bool = False


class SamplingRequest(BaseModel):
    """What both routes take."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", allow_inf_nan=False)

    model: str | None = None
    n: int = Field(default=1, ge=1)
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] = []
    seed: int | None = None
    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=-1)
    """0 and -1 mean no limit."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    repetition_penalty: float = Field(default=1.0, gt=0, le=10)
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
            if not (token_id.isascii() and token_id.isdigit()):
                raise ValueError(f"{token_id!r} is not a token id")
            if not -100 <= value <= 100:
                raise ValueError(f"bias {value:g} of token {token_id} is not within -100 and 100")
        return bias

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> "SamplingRequest":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is for requests with stream: true")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(SamplingRequest):
    prompt: Annotated[Prompt, BeforeValidator(_check_prompt)]
    max_tokens: int | None = Field(default=16, ge=0)
    """null takes what the context has left."""
    best_of: int | None = Field(default=None, ge=1)
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = False
    suffix: str | None = None

    @model_validator(mode="after")
    def _best_of_covers_n(self) -> "CompletionRequest":
        if self.best_of is not None:
            if self.best_of < self.n:
                raise ValueError(f"best_of is {self.best_of}, less than n, which is {self.n}")
            if self.stream and self.best_of > self.n:
                raise ValueError("best_of cannot be streamed: which is best shows at the end")
        return self

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

    @model_validator(mode="after")
    def _nothing_unsupported(self) -> "ChatRequest":
        if self.tools or self.functions:
            raise ValueError("tools are not supported")
        if self.response_format and self.response_format.get("type") != "text":
            raise ValueError("response_format: only text is supported")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        return self
