"""The route `/v1/chat/completions`, which answers messages with a message."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from fastapi import APIRouter, Request, Response

from serving.admission import LiveRelease
from serving.answer import Answers, GeneratedSequence
from serving.chat_schemas import ChatPrompt, ChatRequest, NamedTool
from serving.chat_template import ChatTemplateError
from serving.completions import encode_prompt, make_generations
from serving.conversation import ConversationError
from serving.detokenizer import Delta, TokenText
from serving.engine import Generation
from serving.request_errors import RequestError
from serving.settings import ServingSettings
from serving.tokenizer import ReleaseTokenizer
from serving.tool_calls import FORCED, FORMATS, Found, ToolCallReader, ToolFormat, format_of
from serving.tool_grammar import tool_grammar

_EMPTY_DELTA = Delta()


def add_chat(router: APIRouter, answers: Answers) -> None:
    @router.post("/v1/chat/completions")
    async def chat_completions(asked: ChatRequest, request: Request) -> Response:
        """Continue a conversation. A stream consists of server-sent events; each one is a chunk."""
        settings = answers.settings
        return await answers.respond(request, asked, lambda live: plan_chat(asked, live, settings))


@dataclass(frozen=True, kw_only=True)
class ChatPlan:
    """The `Plan` of a chat. `chunks` and `choices` keep state: use a plan for one answer only."""

    request: ChatRequest
    tokenizer: ReleaseTokenizer
    role: str
    """Of the answer. If it continues the last message of the request, this is the role of that
    message."""
    num_prompt_tokens: int
    generations: list[Generation]
    readers: list[ToolCallReader] | None
    """One reader for each sequence; None if the model may call no tools."""
    num_deltas: Counter[int] = field(default_factory=Counter)
    """Index of a sequence → how many of its deltas `chunks` has written."""
    num_calls: Counter[int] = field(default_factory=Counter)
    """Index of a sequence → how many calls of tools it contains so far."""

    id_prefix = "chatcmpl"
    objects = ("chat.completion", "chat.completion.chunk")

    @property
    def num_each(self) -> int:
        return len(self.generations)

    def choices(self, sequences: list[GeneratedSequence]) -> list[dict[str, Any]]:
        choices = []
        for index, sequence in enumerate(sequences):
            found = self._text_and_calls(index, sequence)
            message: dict[str, Any] = {"role": self.role, "content": found.text}
            if found.calls:
                message["tool_calls"] = [call.body for call in found.calls]
                message["content"] = message["content"] or None
            choices.append(
                {
                    "index": index,
                    "message": message,
                    "logprobs": self._logprobs(sequence.tokens),
                    "finish_reason": self._finish_reason(index, sequence),
                    "stop_reason": sequence.stop_reason,
                }
            )
        return choices

    def chunks(self, index: int, delta: Delta) -> Iterator[str]:
        if not self.num_deltas[index]:
            yield self._chunk(index, {"role": self.role, "content": ""})
        self.num_deltas[index] += 1
        first = self.num_calls[index]
        found = self._text_and_calls(index, delta)
        content: dict[str, Any] = {"content": found.text} if found.text else {}
        if found.calls:
            content["tool_calls"] = [
                {"index": first + number, **call.body} for number, call in enumerate(found.calls)
            ]
        if content or delta.tokens or delta.finish_reason is not None:
            yield self._chunk(index, content, delta)

    def _chunk(self, index: int, content: dict[str, Any], delta: Delta = _EMPTY_DELTA) -> str:
        return json.dumps(
            {
                "index": index,
                "delta": content,
                "logprobs": self._logprobs(delta.tokens) if delta.tokens else None,
                "finish_reason": self._finish_reason(index, delta),
                "stop_reason": delta.stop_reason,
            }
        )

    def _text_and_calls(self, index: int, part: GeneratedSequence | Delta) -> Found:
        if self.readers is None:
            return Found(part.text)
        is_end = part.finish_reason is not None
        found = self.readers[index].add(part.text, is_end=is_end)
        if self.request.parallel_tool_calls is False:
            found.calls = found.calls[: 1 - self.num_calls[index]]
        self.num_calls[index] += len(found.calls)
        return found

    def _finish_reason(self, index: int, part: GeneratedSequence | Delta) -> str | None:
        # If the request names the tool to call, the finish reason is "stop", as in OpenAI and vLLM.
        is_named = isinstance(self.request.tool_choice, NamedTool)
        is_call = part.finish_reason == "stop" and self.num_calls[index] and not is_named
        return "tool_calls" if is_call else part.finish_reason

    def _logprobs(self, tokens: Iterable[TokenText]) -> dict[str, Any] | None:
        if not self.request.logprobs:
            return None
        return {
            "content": [
                {
                    **self._token_body(token.token_id, token.logprob),
                    "top_logprobs": [self._token_body(other, value) for other, value in token.top],
                }
                for token in tokens
            ]
        }

    def _token_body(self, token_id: int, logprob: float | None) -> dict[str, Any]:
        text = self.tokenizer.token_text(token_id)
        own_bytes = list(self.tokenizer.token_bytes(token_id))
        return {"token": text, "logprob": logprob, "bytes": own_bytes}


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
    generations = make_generations(
        request,
        live,
        prompt,
        max_tokens=request.max_completion_tokens or request.max_tokens,
        num_sequences=request.n,
        num_logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        num_prompt_logprobs=None,
        param="messages",
        max_tokens_param="max_completion_tokens" if request.max_completion_tokens else "max_tokens",
    )
    if request.forced_tools:
        if request.grammar is not None:
            raise RequestError(
                400,
                f"tool_choice: not possible together with {request.grammar.param}",
                param="tool_choice",
                code="invalid_value",
            )
        may_be_more = request.tool_choice == "required" and request.parallel_tool_calls is not False
        grammar = tool_grammar(request.forced_tools, is_list=may_be_more)
        generations = [replace(each, grammar=grammar) for each in generations]
    return ChatPlan(
        request=request,
        tokenizer=live.tokenizer,
        role="assistant" if request.generates_a_message else request.messages[-1]["role"],
        num_prompt_tokens=len(prompt),
        generations=generations,
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
        raise RequestError(
            400,
            f"{live.id} has no chat template; send the request to /v1/completions",
            param="messages",
            code="no_chat_template",
        )
    if request.offered_tools and "tools" not in template.variables:
        raise RequestError(
            400,
            f"tools: the chat template of {live.id} shows none to the model; leave tools out",
            param="tools",
            code="no_tools",
        )
    effort: dict[str, Any] = {}
    if request.reasoning_effort is not None:
        # Some templates know only `enable_thinking`. vLLM sets it in the same way.
        effort = {
            "reasoning_effort": request.reasoning_effort,
            "enable_thinking": request.reasoning_effort != "none",
        }
    try:
        text = template.render(
            request.conversation,
            **{
                "add_generation_prompt": request.generates_a_message,
                "continue_final_message": request.continue_final_message,
                **effort,
                **(request.chat_template_kwargs or {}),
            },
        )
    except (ConversationError, ChatTemplateError) as error:
        refuses = "the chat template refuses the messages: "
        reason = f"{refuses if isinstance(error, ChatTemplateError) else ''}{error}"
        raise RequestError(
            400, f"messages: {reason}", param="messages", code="invalid_value"
        ) from None
    # By default, the tokenizer adds no special tokens, because the template already contains them.
    return encode_prompt(live, text, "messages", add_special_tokens=request.add_special_tokens)
