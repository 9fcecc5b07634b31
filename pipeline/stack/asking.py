"""Asks a completion server as a page does: the answer comes in pieces, each with how sure the model
was of it."""

import json
import math
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import httpx
from pydantic import SecretStr

from pipeline.errors import PipelineError

SILENT_SECONDS = 120.0
"""How long the server may say nothing."""
Piece = dict[str, Any]
"""A piece of an answer: its `text`, and how `sure` the model was of it, from 0 to 1. The first
piece of an answer instead says which `release` answers, and the commit of the dataset (`revision`)
on which it was trained."""


async def ask(
    url: str, body: Mapping[str, Any], api_key: SecretStr | None
) -> AsyncGenerator[Piece, None]:
    """The pieces of the answer to a chat (`messages`) or a `prompt`. `url` is that of the route.
    Raises PipelineError if the server does not answer, or refuses the question."""
    bearer = {} if api_key is None else {"Authorization": f"Bearer {api_key.get_secret_value()}"}
    client = httpx.AsyncClient(
        headers=bearer, trust_env=False, verify=False, timeout=SILENT_SECONDS
    )
    more = {"stream": True, "logprobs": True if "messages" in body else 1}
    try:
        async with client, client.stream("POST", url, json={**body, **more}) as answer:
            if not answer.is_success:
                said = (await answer.aread()).decode(errors="replace")[:1000]
                raise PipelineError(f"the server answered {answer.status_code}: {said}")
            headers = {"release": "X-Model-Release", "revision": "X-Dataset-Revision"}
            yield {key: answer.headers.get(name) for key, name in headers.items()}
            logprobs: list[float] = []
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    raise PipelineError(f"the server stopped: {chunk['error']}")
                for choice in chunk["choices"]:
                    found = choice["logprobs"] or {}
                    logprobs += found.get("token_logprobs", ())
                    logprobs += [each["logprob"] for each in found.get("content", ())]
                    # A character may have several tokens, and comes with the last one.
                    if text := choice.get("text") or choice.get("delta", {}).get("content"):
                        yield {"text": text, "sure": math.exp(sum(logprobs))}
                        logprobs = []
    except httpx.TransportError as error:
        raise PipelineError(
            f"no server answers on {url} ({error!r}); `pipeline status` says whether one is up"
        ) from None
