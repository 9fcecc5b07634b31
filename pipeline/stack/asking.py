"""Asks a completion server as a page does: the answer comes in pieces, each with how sure the model
was of it."""

import json
import math
from collections.abc import AsyncGenerator, Iterator, Mapping
from typing import Any

import httpx
from pydantic import SecretStr

from pipeline.errors import PipelineError

SILENT_SECONDS = 120.0
"""How long the server may say nothing."""
NUM_OTHERS = 5
Piece = dict[str, Any]
"""A piece of an answer: its `text`, how `sure` the model was of it, from 0 to 1, and a line for
each of its `tokens`: how probable it was, and how probable the NUM_OTHERS most probable ones were.
The first piece of an answer instead says which `release` answers, and the commit of the dataset
(`revision`) on which it was trained."""
Token = tuple[str, float, Mapping[str, float]]
"""A token, its logprob, and those of the most probable tokens at its place."""


async def ask(
    url: str, body: Mapping[str, Any], api_key: SecretStr | None
) -> AsyncGenerator[Piece, None]:
    """The pieces of the answer to a chat (`messages`) or a `prompt`. `url` is that of the route.
    Raises PipelineError if the server does not answer, or refuses the question."""
    bearer = {} if api_key is None else {"Authorization": f"Bearer {api_key.get_secret_value()}"}
    client = httpx.AsyncClient(
        headers=bearer, trust_env=False, verify=False, timeout=SILENT_SECONDS
    )
    more: dict[str, Any] = {"stream": True, "logprobs": NUM_OTHERS}
    if "messages" in body:
        more |= {"logprobs": True, "top_logprobs": NUM_OTHERS}
    try:
        async with client, client.stream("POST", url, json={**body, **more}) as answer:
            if not answer.is_success:
                said = (await answer.aread()).decode(errors="replace")[:1000]
                raise PipelineError(f"the server answered {answer.status_code}: {said}")
            headers = {"release": "X-Model-Release", "revision": "X-Dataset-Revision"}
            yield {key: answer.headers.get(name) for key, name in headers.items()}
            tokens: list[Token] = []
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    raise PipelineError(f"the server stopped: {chunk['error']}")
                for choice in chunk["choices"]:
                    tokens += _tokens(choice["logprobs"] or {})
                    # A character may have several tokens, and comes with the last one.
                    if text := choice.get("text") or choice.get("delta", {}).get("content"):
                        sure = math.exp(sum(logprob for _, logprob, _ in tokens))
                        lines = [_in_words(*each) for each in tokens]
                        yield {"text": text, "sure": sure, "tokens": "\n".join(lines)}
                        tokens = []
    except httpx.TransportError as error:
        raise PipelineError(
            f"no server answers on {url} ({error!r}); `pipeline status` says whether one is up"
        ) from None


def _tokens(logprobs: Mapping[str, Any]) -> Iterator[Token]:
    """What a completion (three lists) or a chat (a list of objects) says of its tokens."""
    lists = [logprobs.get(key, ()) for key in ("tokens", "token_logprobs", "top_logprobs")]
    yield from zip(*lists, strict=True)
    for each in logprobs.get("content", ()):
        others = {other["token"]: other["logprob"] for other in each["top_logprobs"]}
        yield each["token"], each["logprob"], others


def _in_words(token: str, logprob: float, others: Mapping[str, float]) -> str:
    said, *rest = (
        f"“{text}” {100 * math.exp(each):.1f} %".replace("\n", "↵")
        for text, each in {token: logprob, **others}.items()
    )
    return f"{said}; else {', '.join(rest)}" if rest else said
