"""`/v1/chat/completions`: messages in, a message out."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request, Response

from serving.admission import LiveRelease
from serving.answer import Answers
from serving.answer_schemas import ChatAnswer
from serving.chat_template import ChatTemplateError
from serving.engine import Generation
from serving.openai_schemas import ChatRequest
from serving.request_errors import RequestError
from serving.sequences import (
    Delta,
    Sequence,
    TokenText,
    check_num_sequences,
    check_token_ids,
    make_generations,
)
from serving.tokenizer import ReleaseTokenizer


def add_chat(router: APIRouter, answers: Answers) -> None:
    @router.post("/v1/chat/completions", response_model=ChatAnswer)
    async def chat_completions(asked: ChatRequest, request: Request) -> Response:
        """Continue a conversation. A stream is of server-sent events, each a chunk."""
        max_sequences = answers.settings.max_sequences
        return await answers.respond(
            request, asked, lambda live: plan_chat(asked, live, max_sequences)
        )


@dataclass(frozen=True, kw_only=True)
class ChatPlan:
    request: ChatRequest
    tokenizer: ReleaseTokenizer
    num_prompt_tokens: int
    generations: list[Generation]
    begun: set[int] = field(default_factory=set)
    """Sequences of which a chunk was written."""

    id_prefix = "chatcmpl"
    objects = ("chat.completion", "chat.completion.chunk")

    @property
    def num_each(self) -> int:
        return len(self.generations)

    def choices(self, sequences: list[Sequence]) -> list[dict[str, Any]]:
        return [
            {
                "index": index,
                "message": {"role": "assistant", "content": sequence.text},
                "logprobs": self._logprobs(sequence.tokens),
                "finish_reason": sequence.finish_reason,
            }
            for index, sequence in enumerate(sequences)
        ]

    def chunks(self, index: int, delta: Delta) -> Iterator[str]:
        if index not in self.begun:
            self.begun.add(index)
            yield (
                f'{{"index": {index}, "delta": {{"role": "assistant", "content": ""}}, '
                '"logprobs": null, "finish_reason": null}'
            )
        if delta.text or delta.tokens or delta.finish_reason is not None:
            content = f'"content": {json.dumps(delta.text)}' if delta.text else ""
            yield (
                f'{{"index": {index}, "delta": {{{content}}}, '
                f'"logprobs": {json.dumps(self._logprobs(delta.tokens))}, '
                f'"finish_reason": {json.dumps(delta.finish_reason)}}}'
            )

    def _logprobs(self, tokens: Iterable[TokenText]) -> dict[str, Any] | None:
        if not self.request.logprobs:
            return None
        return {
            "content": [
                {
                    **self._named(token.token_id, token.logprob),
                    "top_logprobs": [self._named(other, value) for other, value in token.top],
                }
                for token in tokens
            ]
        }

    def _named(self, token_id: int, logprob: float | None) -> dict[str, Any]:
        text = self.tokenizer.token_text(token_id)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


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
    return ChatPlan(
        request=request,
        tokenizer=live.tokenizer,
        num_prompt_tokens=len(prompt),
        generations=generations,
    )
