"""The request body of `/v1/chat/completions`: messages, tools, and all fields of
`SamplingRequest`."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator
from pydantic_core import from_json

from serving.conversation import Conversation, normalise
from serving.openai_schemas import (
    MAX_ITEMS,
    MAX_LOGPROBS,
    UNSUPPORTED,
    FewItems,
    Part,
    RequestBody,
    SamplingRequest,
)


def _with_readable_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """As in vLLM, the arguments of an earlier call that are no JSON object count as none. They are
    not an error: all later requests of the conversation contain the same call, so they would all be
    refused."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_readable(call) for call in calls]}


def _readable(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    arguments = function.get("arguments")
    is_text = isinstance(arguments, str) and parse_object(arguments) is not None
    known = arguments if is_text or isinstance(arguments, dict) else {}
    return {**call, "function": {**function, "arguments": known}}


def parse_object(text: str) -> dict[str, Any] | None:
    """The JSON object in `text`. None if `text` is something else. Also None if a request could not
    contain the object either, for example because of NaN, half of a surrogate pair, or too many
    levels."""
    try:
        content = from_json(text, allow_inf_nan=False)
    except ValueError:
        return None
    return content if isinstance(content, dict) else None


class Function(Part, extra="allow"):
    name: str = Field(pattern=r"^[\w.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """The JSON schema of the arguments."""


class Tool(Part, extra="allow"):
    type: Literal["function"]
    function: Function


class FunctionName(Part):
    name: str


class NamedTool(Part):
    type: Literal["function"] = "function"
    function: FunctionName


class ChatPrompt(RequestBody):
    """The fields from which the chat template makes a prompt."""

    unsupported: ClassVar[Mapping[str, object]] = {
        **UNSUPPORTED,
        **dict.fromkeys(("audio", "chat_template", "functions", "media_io_kwargs")),
        **dict.fromkeys(("mm_processor_kwargs", "web_search_options")),
        "function_call": "none",
        "modalities": ["text"],
        "verbosity": "medium",
    }

    messages: list[dict[str, Any]] = Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)
    """`normalise` checks them."""
    add_generation_prompt: bool | None = None
    """Whether the prompt ends with the beginning of a new message of the assistant. null means
    true, or false if `continue_final_message` is true."""
    continue_final_message: bool = False
    add_special_tokens: bool = False
    """Whether the tokenizer adds its special tokens to those that the template writes."""
    documents: Annotated[list[dict[str, Any]], FewItems] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """More variables for the template."""
    reasoning_effort: str | None = None
    """A variable that some templates use. It also sets the variable `enable_thinking`: to false for
    `none`, and to true for other values."""
    tools: Annotated[list[Tool], FewItems] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    """null means `auto`."""

    @field_validator("continue_final_message")
    @classmethod
    def _one_message_is_generated(cls, continues: bool, info: ValidationInfo) -> bool:
        if continues and info.data.get("add_generation_prompt"):
            raise ValueError("cannot be true together with add_generation_prompt")
        return continues

    @field_validator("chat_template_kwargs")
    @classmethod
    def _variables_are_no_fields(cls, kwargs: dict[str, Any] | None) -> dict[str, Any] | None:
        for name in ("messages", "tools", "documents", "continue_final_message", "chat_template"):
            if kwargs and name in kwargs:
                raise ValueError(f"{name} is a field of the request; give it there")
        return kwargs

    @field_validator("tool_choice")
    @classmethod
    def _choice_is_among_the_tools(
        cls, choice: str | NamedTool | None, info: ValidationInfo
    ) -> str | NamedTool | None:
        names = [tool.function.name for tool in info.data.get("tools") or ()]
        if isinstance(choice, NamedTool) and choice.function.name not in names:
            raise ValueError(f"{choice.function.name!r} is none of the tools of this request")
        if choice == "required" and not names:
            raise ValueError("there are no tools to choose from")
        return choice

    @property
    def offered_tools(self) -> list[Tool]:
        """The tools that the model may call."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def forced_tools(self) -> list[Tool]:
        """The tools of which the model must call one; empty if the model may also answer with
        text."""
        choice = self.tool_choice
        if isinstance(choice, NamedTool):
            return [
                each for each in self.offered_tools if each.function.name == choice.function.name
            ]
        return self.offered_tools if choice == "required" else []

    @property
    def conversation(self) -> Conversation:
        """What the chat template gets. Raises ConversationError."""
        return normalise(
            [_with_readable_arguments(message) for message in self.messages],
            [tool.model_dump(exclude_unset=True) for tool in self.offered_tools],
            self.documents,
        )

    @property
    def generates_a_message(self) -> bool:
        """Whether the model writes a new message. If not, it continues the last one."""
        if self.add_generation_prompt is None:
            return not self.continue_final_message
        return self.add_generation_prompt


class ChatRequest(ChatPrompt, SamplingRequest):
    unsupported: ClassVar[Mapping[str, object]] = {**ChatPrompt.unsupported, "echo": False}

    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    parallel_tool_calls: bool | None = None
    """false allows at most one call of a tool. null means true."""

    @field_validator("top_logprobs")
    @classmethod
    def _top_logprobs_are_of_logprobs(cls, number: int | None, info: ValidationInfo) -> int | None:
        if number and not info.data.get("logprobs", True):
            raise ValueError("needs logprobs: true in the same request")
        return number

    @property
    def limit(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None
