"""The routes `/tokenize` and `/detokenize`, with the same bodies as in vLLM. They use the tokenizer
of the live release."""

import asyncio
from typing import Annotated

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse
from pydantic import Discriminator, Field, Tag

from serving.admission import LiveRelease
from serving.answer import Answers
from serving.answer_schemas import DetokenizeAnswer, TokenizeAnswer
from serving.chat import encode_chat
from serving.chat_schemas import ChatPrompt
from serving.openai_schemas import ModelName, RequestBody, TokenIds
from serving.request_errors import model_not_found, nothing_served
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
    return "a chat" if isinstance(body, dict) and "messages" in body else "a text"


TokenizeRequest = Annotated[
    Annotated[TokenizeText, Tag("a text")] | Annotated[TokenizeChat, Tag("a chat")],
    Discriminator(_kind),
]


class DetokenizeRequest(_ForModel):
    tokens: TokenIds = Field()


def add_token_routes(router: APIRouter, answers: Answers) -> None:
    def live_for(model: str | None) -> LiveRelease:
        live = answers.admission.live
        if live is None:
            raise nothing_served(answers.pipeline, answers.admission.unserved)
        if model not in (None, answers.pipeline, live.id):
            raise model_not_found(model, answers.pipeline)
        return live

    @router.post("/tokenize", response_model=TokenizeAnswer)
    async def tokenize(asked: TokenizeRequest) -> Response:
        """The token ids of a text, or of the prompt that the chat template makes of messages."""
        live = live_for(asked.model)

        def answer() -> Response:
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
            return JSONResponse(body.model_dump(), headers={"X-Model-Release": live.id})

        async with asyncio.timeout(answers.settings.request_seconds):
            return await asyncio.to_thread(answer)

    @router.post("/detokenize", response_model=DetokenizeAnswer)
    async def detokenize(asked: DetokenizeRequest) -> Response:
        """The text of token ids, including special tokens."""
        live = live_for(asked.model)

        def answer() -> Response:
            check_token_ids(live, tuple(asked.tokens), "tokens")
            text = live.tokenizer.decode(asked.tokens, skip_special_tokens=False)
            return JSONResponse({"prompt": text}, headers={"X-Model-Release": live.id})

        async with asyncio.timeout(answers.settings.request_seconds):
            return await asyncio.to_thread(answer)
