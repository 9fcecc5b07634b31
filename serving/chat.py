"""`/v1/chat/completions`: the same generations, with messages in and a message out."""

import json
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from serving.admission import LiveRelease
from serving.answer import Answer, usage
from serving.chat_template import ChatTemplateError
from serving.engine import Generation
from serving.generations import check_num_sequences, check_token_ids, make_generations
from serving.openai_schemas import ChatRequest
from serving.request_errors import RequestError
from serving.sequences import TokenText
from serving.tokenizer import ReleaseTokenizer


@dataclass(frozen=True, kw_only=True)
class ChatPlan:
    request: ChatRequest
    num_prompt_tokens: int
    generations: list[Generation]


def plan_chat(request: ChatRequest, live: LiveRelease, max_sequences: int) -> ChatPlan:
    """What to generate for a conversation. Raises RequestError."""
    check_num_sequences(request.n, max_sequences, "n")
    template = live.tokenizer.chat_template
    if template is None:
        raise RequestError(
            400,
            f"{live.id} has no chat template; ask /v1/completions",
            param="messages",
            code="no_chat_template",
        )
    messages = [message.model_dump(exclude_none=True) for message in request.messages]
    try:
        text = template.render(messages)
    except ChatTemplateError as error:
        raise RequestError(
            400,
            f"messages: the chat template refuses them: {error}",
            param="messages",
            code="invalid_value",
        ) from None
    # The template writes the special tokens itself.
    prompt = live.tokenizer.encode(text, add_special_tokens=False)
    if not prompt:
        raise RequestError(400, "messages: nothing in them", param="messages", code="empty_prompt")
    check_token_ids(live, prompt, "messages")
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
    return ChatPlan(request=request, num_prompt_tokens=len(prompt), generations=generations)


async def chat_body(answer: Answer, plan: ChatPlan) -> dict[str, Any]:
    """The whole answer. Raises EngineError."""
    sequences = await answer.all_whole(plan.generations, plan.request.stops)
    return {
        **answer.head("chat.completion"),
        "choices": [
            {
                "index": index,
                "message": {"role": "assistant", "content": sequence.text},
                "logprobs": _logprobs(plan, answer.live.tokenizer, sequence.tokens),
                "finish_reason": sequence.finish_reason,
            }
            for index, sequence in enumerate(sequences)
        ],
        "usage": usage(
            plan.num_prompt_tokens,
            sum(each.num_tokens for each in sequences),
            sequences[0].num_cached_tokens,
        ),
    }


async def chat_events(answer: Answer, plan: ChatPlan) -> AsyncGenerator[str, None]:
    """Server-sent events, the closing `[DONE]` included. Raises EngineError."""
    request = plan.request
    start = answer.chunk_start("chat.completion.chunk")
    end = '], "usage": null}\n\n' if request.includes_usage else "]}\n\n"
    is_new = [True] * request.n
    num_new = num_cached = 0
    async with aclosing(answer.merged(plan.generations, request.stops)) as merged:
        async for index, delta in merged:
            num_new += delta.num_tokens
            if is_new[index]:
                is_new[index] = False
                num_cached += 0 if index else delta.num_cached_tokens
                yield (
                    f'{start}{{"index": {index}, "delta": {{"role": "assistant", "content": ""}}, '
                    f'"logprobs": null, "finish_reason": null}}{end}'
                )
            if not delta.text and not delta.tokens and delta.finish_reason is None:
                continue
            content = f'"content": {json.dumps(delta.text)}' if delta.text else ""
            logprobs = _logprobs(plan, answer.live.tokenizer, delta.tokens)
            yield (
                f'{start}{{"index": {index}, "delta": {{{content}}}, '
                f'"logprobs": {json.dumps(logprobs)}, '
                f'"finish_reason": {json.dumps(delta.finish_reason)}}}{end}'
            )
    if request.includes_usage:
        counted = json.dumps(usage(plan.num_prompt_tokens, num_new, num_cached))
        yield f'{start}], "usage": {counted}}}\n\n'
    yield "data: [DONE]\n\n"


def _logprobs(
    plan: ChatPlan, tokenizer: ReleaseTokenizer, tokens: Iterable[TokenText]
) -> dict[str, Any] | None:
    if not plan.request.logprobs:
        return None
    return {
        "content": [
            {
                **_named(tokenizer, token.token_id, token.logprob),
                "top_logprobs": [_named(tokenizer, other, value) for other, value in token.top],
            }
            for token in tokens
        ]
    }


def _named(tokenizer: ReleaseTokenizer, token_id: int, logprob: float | None) -> dict[str, Any]:
    text = tokenizer.token_text(token_id)
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
