"""The route `/v1/completions`, which continues prompts."""

import json
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from fastapi import APIRouter, Request, Response

from serving.admission import LiveRelease
from serving.answer import Answers
from serving.answer_schemas import CompletionAnswer
from serving.detokenizer import Delta, TokenText, text_offsets
from serving.engine import Generation, TokenLogprob
from serving.openai_schemas import CompletionRequest
from serving.sequences import (
    GeneratedSequence,
    check_num_sequences,
    encode_prompt,
    make_generations,
)
from serving.tokenizer import ReleaseTokenizer


def add_completions(router: APIRouter, answers: Answers) -> None:
    @router.post("/v1/completions", response_model=CompletionAnswer)
    async def completions(asked: CompletionRequest, request: Request) -> Response:
        """Continue one or more prompts. A stream consists of server-sent events; each one is a
        chunk."""
        max_sequences = answers.settings.max_sequences
        return await answers.respond(
            request, asked, lambda live: plan_completion(asked, live, max_sequences)
        )


@dataclass(frozen=True, kw_only=True)
class CompletionPlan:
    """The `Plan` of a completion. `chunks` keeps state, so use a plan for one answer only."""

    request: CompletionRequest
    tokenizer: ReleaseTokenizer
    prompts: list[tuple[int, ...]]
    echoes: list[str]
    """For each prompt, the text to put before its completions; an empty text without `echo`."""
    echo_offsets: list[list[int]]
    """For each prompt, the offsets of its tokens in its echo; empty if no logprobs show them."""
    generations: list[Generation]
    num_each: int
    """How many sequences are generated for each prompt: `best_of` or `n` of the request."""
    begun: set[int] = field(default_factory=set)
    """The indices of the sequences for which `chunks` was called already."""

    id_prefix = "cmpl"
    objects = ("text_completion", "text_completion")

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt) for prompt in self.prompts)

    def choices(self, sequences: list[GeneratedSequence]) -> Iterator[dict[str, Any]]:
        request = self.request
        indices = count()
        for number, echo in enumerate(self.echoes):
            found = sequences[number * self.num_each : (number + 1) * self.num_each]
            prompt_logprobs = found[0].prompt_logprobs or ()
            if self.num_each > request.n:
                found = sorted(found, key=lambda each: -each.mean_logprob)[: request.n]
            for sequence in found:
                logprobs = None
                if request.logprobs is not None:
                    logprobs = _Logprobs(self.tokenizer)
                    if request.echo:
                        logprobs.add_prompt(
                            self.prompts[number], self.echo_offsets[number], prompt_logprobs
                        )
                    logprobs.add(sequence.tokens, len(echo))
                yield {
                    "index": next(indices),
                    "text": echo + sequence.text,
                    "logprobs": logprobs.body if logprobs else None,
                    "finish_reason": sequence.finish_reason,
                    "stop_reason": sequence.stop_reason,
                }

    def chunks(self, index: int, delta: Delta) -> Iterator[str]:
        text = delta.text
        logprobs = None if self.request.logprobs is None else _Logprobs(self.tokenizer)
        number = index // self.num_each
        echo = self.echoes[number]
        if index not in self.begun:
            self.begun.add(index)
            text = echo + text
            if logprobs and self.request.echo:
                logprobs.add_prompt(
                    self.prompts[number], self.echo_offsets[number], delta.prompt_logprobs or ()
                )
        if logprobs:
            logprobs.add(delta.tokens, len(echo))
        if text or delta.finish_reason is not None or (logprobs and logprobs.body["tokens"]):
            yield (
                f'{{"index": {index}, "text": {json.dumps(text)}, "logprobs": '
                f"{json.dumps(logprobs.body) if logprobs else 'null'}, "
                f'"finish_reason": {json.dumps(delta.finish_reason)}, '
                f'"stop_reason": {json.dumps(delta.stop_reason)}}}'
            )


def plan_completion(
    request: CompletionRequest, live: LiveRelease, max_sequences: int
) -> CompletionPlan:
    """Decide what to generate for a request. Raises RequestError if the request does not fit the
    release, or asks for more than `max_sequences` sequences."""
    num_each = request.best_of or request.n
    most = "prompt" if num_each == 1 else "n" if request.best_of is None else "best_of"
    check_num_sequences(request.num_sequences, max_sequences, most)
    prompts = [
        encode_prompt(live, prompt, "prompt", add_special_tokens=request.add_special_tokens)
        for prompt in request.prompts
    ]
    echoes = [
        _echo(request, live.tokenizer, given if isinstance(given, str) else None, token_ids)
        for given, token_ids in zip(request.prompts, prompts, strict=True)
    ]
    ranks = request.best_of is not None and request.best_of > request.n
    return CompletionPlan(
        request=request,
        tokenizer=live.tokenizer,
        prompts=prompts,
        echoes=[text for text, _ in echoes],
        echo_offsets=[offsets for _, offsets in echoes],
        generations=[
            generation
            for prompt in prompts
            for generation in make_generations(
                request,
                live,
                prompt,
                max_tokens=request.max_tokens,
                num_sequences=num_each,
                num_logprobs=0 if request.logprobs is None and ranks else request.logprobs,
                num_prompt_logprobs=request.logprobs if request.echo else None,
                param="prompt",
            )
        ],
        num_each=num_each,
    )


def _echo(
    request: CompletionRequest,
    tokenizer: ReleaseTokenizer,
    given: str | None,
    token_ids: tuple[int, ...],
) -> tuple[str, list[int]]:
    """The text to put before the completions of a prompt, and the offsets of the prompt's tokens in
    this text. `given` is the prompt's text; None if the prompt was given as token ids."""
    if not request.echo:
        return "", []
    hides_special = given is None and request.skip_special_tokens
    text = (
        tokenizer.decode(token_ids, skip_special_tokens=hides_special) if given is None else given
    )
    if request.logprobs is None:
        return text, []
    hidden: Collection[int] = ()
    if hides_special:
        special = tokenizer.special_ids
        hidden = {at for at, token_id in enumerate(token_ids) if token_id in special}
    elif given is not None and request.add_special_tokens:
        hidden = tokenizer.added_positions(given)
    return text, text_offsets(tokenizer, token_ids, hidden)


class _Logprobs:
    """The object `logprobs` of a choice: four lists with one entry for each token."""

    def __init__(self, tokenizer: ReleaseTokenizer) -> None:
        self._tokenizer = tokenizer
        self.body: dict[str, list[Any]] = {
            "text_offset": [],
            "token_logprobs": [],
            "tokens": [],
            "top_logprobs": [],
        }

    def add_prompt(
        self, prompt: tuple[int, ...], offsets: list[int], logprobs: Iterable[TokenLogprob]
    ) -> None:
        # The first token has no logprob, because there is no token before it.
        self._append(prompt[0], offsets[0], None, ())
        for token_id, offset, found in zip(prompt[1:], offsets[1:], logprobs, strict=True):
            self._append(token_id, offset, found.logprob, found.top)

    def add(self, tokens: Iterable[TokenText], offset: int) -> None:
        for token in tokens:
            self._append(token.token_id, offset + token.offset, token.logprob, token.top)

    def _append(
        self,
        token_id: int,
        offset: int,
        logprob: float | None,
        top: Iterable[tuple[int, float]],
    ) -> None:
        best: dict[str, float] | None = None
        if logprob is not None:
            # Several tokens may have the same text, for example parts of a character. Keep the
            # logprob of the most probable one, which comes first.
            best = {}
            for other, value in (*top, (token_id, logprob)):
                best.setdefault(self._tokenizer.token_text(other), value)
        self.body["text_offset"].append(offset)
        self.body["token_logprobs"].append(logprob)
        self.body["tokens"].append(self._tokenizer.token_text(token_id))
        self.body["top_logprobs"].append(best)
