"""The schemas of the answers, for the OpenAPI document. The routes for completions write their JSON
without these schemas, because a validation of each chunk would slow streams down."""

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
    """How many prompt tokens the engine found in its cache for this release."""


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
    """The id of the release that answers."""
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
    """The stop string, or the id among `stop_token_ids`, that ended the text."""


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
    """`assistant`. But if the answer continues the last message of the request, this is the role of
    that message."""
    content: str | None
    tool_calls: list[AnsweredToolCall] = []


class ChatChoice(_Answer):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | Literal["tool_calls"]
    stop_reason: str | int | None
    """The stop string, or the id among `stop_token_ids`, that ended the text."""


class ChatAnswer(_WithHead):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class ModelAnswer(_Answer):
    id: str
    object: Literal["model"] = "model"
    created: int
    """Since when the release is live, in Unix seconds."""
    owned_by: Literal["hotpush"] = "hotpush"
    root: str
    """The folder of the release."""
    release: str
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
    """The version of this server, not of its engine."""


class LiveAnswer(_Answer):
    status: Literal["ok", "dead"]
    reason: str | None = None


class HealthAnswer(_Answer):
    status: Literal["ok", "waiting", "stopping", "failed"]
    release: str | None = None
    dataset_revision: str | None = None
    stands_in_for: str | None = None
    """The id of the damaged release for which `release` is the substitute."""
    reason: str | None = None


_FAULTS: dict[int | str, str] = {
    400: "A field is wrong or not supported",
    401: "The API key is missing or wrong",
    404: "This model is not served here",
    409: "`X-Exact-Release` names a release that is not live",
    413: "The body is too large",
    429: "Too many requests run or wait",
    503: "No release is served, or the engine failed",
    504: "The answer took too long",
    # Without a description of "4XX", FastAPI would add a description of 422. But no route with
    # these errors answers 422.
    "4XX": "Another error in the request",
}

ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorAnswer, "description": description}
    for status, description in _FAULTS.items()
}
"""The argument `responses` of a route that has these errors."""
