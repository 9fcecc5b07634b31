"""The route `/v1/chat/completions`, which answers messages with a message."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from fastapi import APIRouter, Request, Response

from serving.admission import LiveRelease
from serving.answer import Answers, Plan
from serving.chat_schemas import ChatPrompt, ChatRequest, NamedTool
from serving.chat_template import ChatTemplateError
from serving.completions import encode_prompt, make_generations
from serving.conversation import ConversationError
from serving.detokenizer import Delta
from serving.request_errors import invalid
from serving.settings import ServingSettings
from serving.tool_calls import (
    FORCED,
    FORMATS,
    Found,
    ToolCallReader,
    ToolFormat,
    format_of,
    tool_grammar,
)


def add_chat(router: APIRouter, answers: Answers) -> None:
    @router.post("/v1/chat/completions")
    async def chat_completions(asked: ChatRequest, request: Request) -> Response:
        """Continue a conversation. A stream consists of server-sent events; each one is a chunk."""
        settings = answers.settings
        return await answers.respond(request, asked, lambda live: plan_chat(asked, live, settings))


@dataclass(frozen=True, kw_only=True)
class ChatPlan(Plan):
    id_prefix: ClassVar[str] = "chatcmpl"
    objects: ClassVar[tuple[str, str]] = ("chat.completion", "chat.completion.chunk")

    request: ChatRequest
    role: str
    """Of the answer. If it continues the last message of the request, this is the role of that
    message."""
    readers: list[ToolCallReader] | None
    """One reader for each sequence; None if the model may call no tools."""

    def choices(self, sequences: list[Delta]) -> Iterator[dict[str, Any]]:
        for index, sequence in enumerate(sequences):
            found = self._read(index, sequence)
            message: dict[str, Any] = {"role": self.role, "content": found.text}
            if found.calls:
                message |= {"content": found.text or None, "tool_calls": found.calls}
            yield self._choice(index, sequence, found, message=message)

    def chunks(self, index: int, delta: Delta) -> Iterator[dict[str, Any]]:
        if index not in self.begun:
            self.begun.add(index)
            yield self._choice(index, Delta(), Found(), delta={"role": self.role, "content": ""})
        found = self._read(index, delta)
        content: dict[str, Any] = {"content": found.text} if found.text else {}
        if found.calls:
            calls = enumerate(found.calls)
            content["tool_calls"] = [{"index": number, **call} for number, call in calls]
        if content or delta.tokens or delta.finish_reason is not None:
            yield self._choice(index, delta, found, delta=content)

    def _read(self, index: int, part: Delta) -> Found:
        if self.readers is None:
            return Found(part.text)
        found = self.readers[index].add(part.text, is_end=part.finish_reason is not None)
        if self.request.parallel_tool_calls is False:
            found.calls = found.calls[:1]
        return found

    def _choice(self, index: int, part: Delta, found: Found, **content: Any) -> dict[str, Any]:
        # If the request names the tool to call, the finish reason is "stop", as in OpenAI and vLLM.
        is_named = isinstance(self.request.tool_choice, NamedTool)
        is_call = part.finish_reason == "stop" and found.calls and not is_named
        return {
            "index": index,
            **content,
            "logprobs": self._logprobs(part) if self.request.logprobs and part.tokens else None,
            "finish_reason": "tool_calls" if is_call else part.finish_reason,
            "stop_reason": part.stop_reason,
        }

    def _logprobs(self, part: Delta) -> dict[str, Any]:
        return {
            "content": [
                {
                    **self._token_body(token.token_id, token.logprob),
                    "top_logprobs": [self._token_body(*other) for other in token.top],
                }
                for token in part.tokens
            ]
        }

    def _token_body(self, token_id: int, logprob: float | None) -> dict[str, Any]:
        tokenizer = self.live.tokenizer
        own_bytes = list(tokenizer.token_bytes(token_id))
        return {"token": tokenizer.token_text(token_id), "logprob": logprob, "bytes": own_bytes}


def plan_chat(request: ChatRequest, live: LiveRelease, settings: ServingSettings) -> ChatPlan:
    """Decide what to generate for a conversation. Raises RequestError if the request does not fit
    the release."""
    prompt = encode_chat(request, live)
    readers = None
    if request.offered_tools:
        format = FORCED if request.forced_tools else _tool_format(live, settings)
        names = {tool.function.name for tool in request.offered_tools}
        readers = [ToolCallReader(format, names) for _ in range(request.n)]
        if live.tokenizer.is_special(format.begin):
            request = request.model_copy(update={"skip_special_tokens": False})
    generations = make_generations(request, live, prompt, "messages")
    if request.forced_tools:
        if request.grammar is not None:
            raise invalid("tool_choice", f"not possible together with {request.grammar.param}")
        may_be_more = request.tool_choice == "required" and request.parallel_tool_calls is not False
        grammar = tool_grammar(request.forced_tools, is_list=may_be_more)
        generations = [replace(each, grammar=grammar) for each in generations]
    return ChatPlan(
        request=request,
        live=live,
        generations=generations,
        role="assistant" if request.generates_a_message else request.messages[-1]["role"],
        readers=readers,
    )


def _tool_format(live: LiveRelease, settings: ServingSettings) -> ToolFormat:
    if settings.tool_format != "auto":
        return FORMATS[settings.tool_format]
    template = live.tokenizer.chat_template
    return format_of("" if template is None else template.source)


def encode_chat(request: ChatPrompt, live: LiveRelease) -> tuple[int, ...]:
    """The token ids of the prompt that the release's chat template makes of the messages.

    Raises RequestError if the release has no chat template, if the template refuses the messages,
    or if the prompt is empty or has a token id that the network does not know.
    """
    template = live.tokenizer.chat_template
    if template is None:
        reason = f"{live.id} has no chat template; send the request to /v1/completions"
        raise invalid("messages", reason, code="no_chat_template")
    if request.offered_tools and "tools" not in template.variables:
        reason = f"the chat template of {live.id} shows none to the model; leave tools out"
        raise invalid("tools", reason, code="no_tools")
    options: dict[str, Any] = {
        "add_generation_prompt": request.generates_a_message,
        "continue_final_message": request.continue_final_message,
    }
    if request.reasoning_effort is not None:
        # Some templates know only `enable_thinking`. vLLM sets it in the same way.
        options["reasoning_effort"] = request.reasoning_effort
        options["enable_thinking"] = request.reasoning_effort != "none"
    options |= request.chat_template_kwargs or {}
    try:
        text = template.render(request.conversation, **options)
    except ConversationError as error:
        raise invalid("messages", str(error)) from None
    except ChatTemplateError as error:
        raise invalid("messages", f"the chat template refuses the messages: {error}") from None
    # By default, the tokenizer adds no special tokens, because the template already contains them.
    return encode_prompt(live, text, "messages", add_special_tokens=request.add_special_tokens)
