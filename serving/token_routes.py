"""The routes `/tokenize` and `/detokenize`, with the same bodies as in vLLM. They use the tokenizer
of the live release."""

from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import Field

from serving.admission import LiveRelease
from serving.answer import Answers
from serving.chat import encode_chat
from serving.chat_schemas import ChatPrompt
from serving.completions import check_token_ids
from serving.openai_schemas import MAX_ITEMS, ModelName, RequestBody, TokenIds
from serving.request_errors import invalid


class TokenizeRequest(ChatPrompt):
    """A text as `prompt`, or a chat as `messages`."""

    model: ModelName = None
    prompt: str | None = None
    messages: list[dict[str, Any]] = Field(default=[], max_length=MAX_ITEMS, fail_fast=True)
    return_token_strs: bool = False


class DetokenizeRequest(RequestBody):
    model: ModelName = None
    tokens: TokenIds = Field()


def add_token_routes(router: APIRouter, answers: Answers) -> None:
    @router.post("/tokenize")
    async def tokenize(asked: TokenizeRequest, request: Request) -> Response:
        """The token ids of a text, or of the prompt that the chat template makes of messages."""

        def answer(live: LiveRelease) -> Response:
            if asked.messages:
                token_ids = encode_chat(asked, live)
            elif asked.prompt is not None:
                is_given = "add_special_tokens" in asked.model_fields_set
                special = asked.add_special_tokens if is_given else True
                token_ids = live.tokenizer.encode(asked.prompt, add_special_tokens=special)
            else:
                raise invalid("prompt", "give it, or messages")
            names = None
            if asked.return_token_strs:
                names = [str(live.tokenizer.tokenizer.id_to_token(each)) for each in token_ids]
            body = {
                "count": len(token_ids),
                "max_model_len": live.context_length,
                "tokens": list(token_ids),
                "token_strs": names,
            }
            return JSONResponse(body, headers={"X-Model-Release": live.id})

        return await answers.use_tokenizer(request, asked.model, answer)

    @router.post("/detokenize")
    async def detokenize(asked: DetokenizeRequest, request: Request) -> Response:
        """The text of token ids, including special tokens."""

        def answer(live: LiveRelease) -> Response:
            check_token_ids(live, tuple(asked.tokens), "tokens")
            text = live.tokenizer.decode(asked.tokens, skip_special_tokens=False)
            return JSONResponse({"prompt": text}, headers={"X-Model-Release": live.id})

        return await answers.use_tokenizer(request, asked.model, answer)
