"""The routes `/tokenize` and `/detokenize`, with the same bodies as in vLLM. They use the tokenizer
of the live release."""

import asyncio
from collections.abc import Callable
from typing import Annotated

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import Discriminator, Field, Tag

from serving.admission import LiveRelease
from serving.answer import Answers, in_thread
from serving.answer_schemas import DetokenizeAnswer, TokenizeAnswer
from serving.chat import encode_chat
from serving.chat_schemas import ChatPrompt
from serving.event_stream import unless_disconnected
from serving.openai_schemas import ModelName, RequestBody, TokenIds
from serving.sequences import check_token_ids
from serving.unsupported_fields import Unsupported, UnsupportedChat


class _ForModel(RequestBody):
    model: ModelName = None


class TokenizeText(_ForModel, Unsupported):
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChat(_ForModel, ChatPrompt, UnsupportedChat):
    return_token_strs: bool = False


def _kind(body: object) -> str:
    is_chat = "messages" in body if isinstance(body, dict) else isinstance(body, TokenizeChat)
    return "a chat" if is_chat else "a text"


TokenizeRequest = Annotated[
    Annotated[TokenizeText, Tag("a text")] | Annotated[TokenizeChat, Tag("a chat")],
    Discriminator(_kind),
]


class DetokenizeRequest(_ForModel):
    tokens: TokenIds = Field()


def add_token_routes(router: APIRouter, answers: Answers) -> None:
    async def respond(
        request: Request, model: str | None, answer: Callable[[LiveRelease], Response]
    ) -> Response:
        async with asyncio.timeout(answers.settings.request_seconds):
            live = await answers.admit(request, model)
            try:
                answering = in_thread(answers.planners, answer, live)
                return await unless_disconnected(request.receive, answering)
            finally:
                answers.admission.leave(live)

    @router.post("/tokenize", response_model=TokenizeAnswer)
    async def tokenize(asked: TokenizeRequest, request: Request) -> Response:
        """The token ids of a text, or of the prompt that the chat template makes of messages."""

        def answer(live: LiveRelease) -> Response:
            if isinstance(asked, TokenizeChat):
                token_ids = encode_chat(asked, live)
            else:
                special = asked.add_special_tokens
                token_ids = live.tokenizer.encode(asked.prompt, add_special_tokens=special)
            names = None
            if asked.return_token_strs:
                names = [str(live.tokenizer.tokenizer.id_to_token(each)) for each in token_ids]
            body = TokenizeAnswer(
                count=len(token_ids),
                max_model_len=live.context_length,
                tokens=list(token_ids),
                token_strs=names,
            )
            # For a long list this is much faster than `json.dumps`, and no other thread can run
            # meanwhile.
            content = body.model_dump_json()
            headers = {"X-Model-Release": live.id}
            return Response(content, headers=headers, media_type="application/json")

        return await respond(request, asked.model, answer)

    @router.post("/detokenize", response_model=DetokenizeAnswer)
    async def detokenize(asked: DetokenizeRequest, request: Request) -> Response:
        """The text of token ids, including special tokens."""

        def answer(live: LiveRelease) -> Response:
            check_token_ids(live, tuple(asked.tokens), "tokens")
            text = live.tokenizer.decode(asked.tokens, skip_special_tokens=False)
            return JSONResponse({"prompt": text}, headers={"X-Model-Release": live.id})

        return await respond(request, asked.model, answer)
