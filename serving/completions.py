"""`/v1/completions`: whole and streamed bodies."""

import json
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from serving.admission import LiveRelease
from serving.answer import Answer, usage
from serving.engine import Generation, TokenLogprob
from serving.generations import check_num_sequences, encode_prompt, make_generations
from serving.openai_schemas import CompletionRequest
from serving.sequences import TokenText
from serving.tokenizer import Detokenizer, ReleaseTokenizer

OBJECT = "text_completion"


@dataclass(frozen=True, kw_only=True)
class CompletionPlan:
    request: CompletionRequest
    prompts: list[tuple[int, ...]]
    echoes: list[str]
    """Text put before each prompt's completions; empty without `echo`."""
    generations: list[Generation]
    """`num_each` for the first prompt, then for the second, …"""
    num_each: int

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt) for prompt in self.prompts)


def plan_completion(
    request: CompletionRequest, live: LiveRelease, max_sequences: int
) -> CompletionPlan:
    """What to generate for a request. Raises RequestError."""
    num_each = request.best_of or request.n
    most = "prompt" if num_each == 1 else "n" if request.best_of is None else "best_of"
    check_num_sequences(len(request.prompts) * num_each, max_sequences, most)
    prompts = [encode_prompt(live, prompt, "prompt") for prompt in request.prompts]
    ranks = request.best_of is not None and request.best_of > request.n
    num_logprobs = 0 if request.logprobs is None and ranks else request.logprobs
    return CompletionPlan(
        request=request,
        prompts=prompts,
        echoes=[
            "" if not request.echo else given if isinstance(given, str) else _text(live, token_ids)
            for given, token_ids in zip(request.prompts, prompts, strict=True)
        ],
        generations=[
            generation
            for prompt in prompts
            for generation in make_generations(
                request,
                live,
                prompt,
                max_tokens=request.max_tokens,
                num_sequences=num_each,
                num_logprobs=num_logprobs,
                num_prompt_logprobs=request.logprobs if request.echo else None,
                param="prompt",
            )
        ],
        num_each=num_each,
    )


async def completion_body(answer: Answer, plan: CompletionPlan) -> dict[str, Any]:
    """The whole answer. Raises EngineError."""
    request = plan.request
    sequences = await answer.all_whole(plan.generations, request.stops)
    choices: list[dict[str, Any]] = []
    for number, (prompt, echo) in enumerate(zip(plan.prompts, plan.echoes, strict=True)):
        found = sequences[number * plan.num_each : (number + 1) * plan.num_each]
        if plan.num_each > request.n:
            found = sorted(found, key=lambda each: -each.mean_logprob)[: request.n]
        for sequence in found:
            logprobs = None
            if request.logprobs is not None:
                logprobs = _Logprobs(answer.live.tokenizer)
                if request.echo:
                    logprobs.add_prompt(prompt, sequence.prompt_logprobs or ())
                logprobs.add(sequence.tokens, len(echo))
            choices.append(
                {
                    "index": len(choices),
                    "text": echo + sequence.text,
                    "logprobs": logprobs.body if logprobs else None,
                    "finish_reason": sequence.finish_reason,
                }
            )
    num_new = sum(sequence.num_tokens for sequence in sequences)
    # A prompt counts once, and so does what was found of it.
    num_cached = sum(sequence.num_cached_tokens for sequence in sequences[:: plan.num_each])
    return {
        **answer.head(OBJECT),
        "choices": choices,
        "usage": usage(plan.num_prompt_tokens, num_new, num_cached),
    }


async def completion_events(answer: Answer, plan: CompletionPlan) -> AsyncGenerator[str, None]:
    """Server-sent events, the closing `[DONE]` included. Raises EngineError."""
    request = plan.request
    start = answer.chunk_start(OBJECT)
    end = '], "usage": null}\n\n' if request.includes_usage else "]}\n\n"
    is_new = [True] * len(plan.generations)
    num_new = num_cached = 0
    async with aclosing(answer.merged(plan.generations, request.stops)) as merged:
        async for index, delta in merged:
            num_new += delta.num_tokens
            text = delta.text
            logprobs = None if request.logprobs is None else _Logprobs(answer.live.tokenizer)
            echo = plan.echoes[index // plan.num_each]
            if is_new[index]:
                is_new[index] = False
                num_cached += 0 if index % plan.num_each else delta.num_cached_tokens
                text = echo + text
                if logprobs and request.echo:
                    prompt = plan.prompts[index // plan.num_each]
                    logprobs.add_prompt(prompt, delta.prompt_logprobs or ())
            if logprobs:
                logprobs.add(delta.tokens, len(echo))
            has_tokens = logprobs is not None and logprobs.has_tokens
            if not text and not has_tokens and delta.finish_reason is None:
                continue
            yield (
                f'{start}{{"index": {index}, "text": {json.dumps(text)}, "logprobs": '
                f"{json.dumps(logprobs.body) if logprobs else 'null'}, "
                f'"finish_reason": {json.dumps(delta.finish_reason)}}}{end}'
            )
    if request.includes_usage:
        counted = json.dumps(usage(plan.num_prompt_tokens, num_new, num_cached))
        yield f'{start}], "usage": {counted}}}\n\n'
    yield "data: [DONE]\n\n"


class _Logprobs:
    """The `logprobs` object of a choice: four lists, an entry for each token."""

    def __init__(self, tokenizer: ReleaseTokenizer) -> None:
        self._tokenizer = tokenizer
        self._text_offset: list[int] = []
        self._token_logprobs: list[float | None] = []
        self._tokens: list[str] = []
        self._top_logprobs: list[dict[str, float] | None] = []

    @property
    def body(self) -> dict[str, Any]:
        return {
            "text_offset": self._text_offset,
            "token_logprobs": self._token_logprobs,
            "tokens": self._tokens,
            "top_logprobs": self._top_logprobs,
        }

    @property
    def has_tokens(self) -> bool:
        return bool(self._tokens)

    def add_prompt(self, prompt: tuple[int, ...], logprobs: Iterable[TokenLogprob]) -> None:
        # The first token of a prompt has nothing before it that could make it likely.
        self._append(prompt[0], 0, None, ())
        detokenizer = Detokenizer(self._tokenizer)
        offset = len(detokenizer.add(prompt[0]))
        for token_id, found in zip(prompt[1:], logprobs, strict=True):
            self._append(token_id, offset, found.logprob, found.top)
            offset += len(detokenizer.add(token_id))

    def add(self, tokens: Iterable[TokenText], offset: int) -> None:
        for token in tokens:
            self._append(token.token_id, offset + token.offset, token.logprob, token.top)

    def _append(
        self,
        token_id: int,
        offset: int,
        logprob: float | None,
        top: Sequence[tuple[int, float]],
    ) -> None:
        name = self._tokenizer.token_text(token_id)
        self._text_offset.append(offset)
        self._tokens.append(name)
        self._token_logprobs.append(logprob)
        if logprob is None:
            self._top_logprobs.append(None)
            return
        best: dict[str, float] = {}
        for other, value in top:
            # Tokens that are parts of characters may be called the same; the likeliest stays.
            best.setdefault(self._tokenizer.token_text(other), value)
        best.setdefault(name, logprob)
        self._top_logprobs.append(best)


def _text(live: LiveRelease, token_ids: tuple[int, ...]) -> str:
    return live.tokenizer.decode(token_ids)
