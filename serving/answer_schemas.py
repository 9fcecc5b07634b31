"""What the routes answer, for the OpenAPI document. The routes write their answers themselves: a
stream has no time to be validated."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

FinishReason = Literal["stop", "length"]


class _Answer(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)


class ErrorDetail(_Answer):
    message: str
    type: str
    param: str | None
    """The field that is wrong."""
    code: str | None


class ErrorAnswer(_Answer):
    error: ErrorDetail


class PromptTokensDetails(_Answer):
    cached_tokens: int
    """Those that the engine found in its cache for this release."""


class Usage(_Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class _WithHead(_Answer):
    id: str
    created: int
    """Unix seconds."""
    model: str
    system_fingerprint: str
    """The release that answers."""
    usage: Usage


class CompletionLogprobs(_Answer):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(_Answer):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None
    """The stop string, or the id among `stop_token_ids`, that ended it."""


class CompletionAnswer(_WithHead):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class TopLogprob(_Answer):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprobs(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(_Answer):
    content: list[TokenLogprobs]


class AnsweredFunction(_Answer):
    name: str
    arguments: str
    """JSON text, as the model wrote it."""


class AnsweredToolCall(_Answer):
    id: str
    type: Literal["function"]
    function: AnsweredFunction


class AnswerMessage(_Answer):
    role: str
    """`assistant`, or that of the last message if it is continued."""
    content: str | None
    tool_calls: list[AnsweredToolCall] = []


class ChatChoice(_Answer):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | Literal["tool_calls"]
    stop_reason: str | int | None
    """The stop string, or the id among `stop_token_ids`, that ended it."""


class ChatAnswer(_WithHead):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class ModelAnswer(_Answer):
    id: str
    object: Literal["model"] = "model"
    created: int
    """Unix seconds: since when the release is live."""
    owned_by: Literal["hotpush"] = "hotpush"
    root: str
    """The folder of the release."""
    release: str
    previous: str | None
    """The release that was live before."""
    dataset_revision: str | None
    max_model_len: int


class ModelsAnswer(_Answer):
    object: Literal["list"] = "list"
    data: list[ModelAnswer]


class TokenizeAnswer(_Answer):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeAnswer(_Answer):
    prompt: str


class VersionAnswer(_Answer):
    version: str
    """Of this server, not of its engine."""


class LiveAnswer(_Answer):
    status: Literal["ok", "dead"]
    reason: str | None = None


class HealthAnswer(_Answer):
    status: Literal["ok", "waiting", "stopping", "failed"]
    release: str | None = None
    dataset_revision: str | None = None
    stands_in_for: str | None = None
    """The damaged release in whose place `release` is served."""
    reason: str | None = None


_FAULTS: dict[int | str, str] = {
    400: "A field is wrong, or not supported",
    401: "The API key is missing or wrong",
    404: "This model is not served here",
    409: "`X-Exact-Release` names another release than the live one",
    413: "The body is too large",
    429: "Too many requests run or wait",
    503: "No release is served, or the engine failed",
    504: "The answer took too long",
    # Stands for 422 too, which FastAPI would describe otherwise. Nothing here answers 422.
    "4XX": "Another fault of the request",
}

ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorAnswer, "description": description}
    for status, description in _FAULTS.items()
}
"""For `responses` of a route."""
