"""The route `/v1/completions`, which continues prompts. Makes a `Generation` for each sequence of a
request, also for chats."""

import json
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from serving.admission import LiveRelease
from serving.answer import Answers, GeneratedSequence
from serving.detokenizer import Delta, TokenText, text_offsets
from serving.engine import Generation, TokenLogprob
from serving.openai_schemas import MAX_SEED, MIN_SEED, CompletionRequest, SamplingRequest
from serving.request_errors import RequestError
from serving.tokenizer import ReleaseTokenizer

MAX_STEP_TOKENS = 16
"""The largest number of tokens in one step of a request that is not a stream. With more tokens per
step, the event loop would save little, and streams would wait longer while it handles a step."""


def add_completions(router: APIRouter, answers: Answers) -> None:
    @router.post("/v1/completions")
    async def completions(asked: CompletionRequest, request: Request) -> Response:
        """Continue one or more prompts. A stream consists of server-sent events; each one is a
        chunk."""
        return await answers.respond(request, asked, partial(plan_completion, asked))


@dataclass(frozen=True, kw_only=True)
class CompletionPlan:
    """The `Plan` of a completion. It keeps state, so use it for one answer only."""

    request: CompletionRequest
    tokenizer: ReleaseTokenizer
    prompts: list[tuple[int, ...]]
    echoes: list[str]
    """For each prompt, the text to put before its completions; an empty text without `echo`."""
    echo_offsets: list[list[int]]
    """For each prompt, the offsets of its tokens in its echo; empty if no logprobs show them."""
    generations: list[Generation]
    num_each: int
    """How many sequences are generated for each prompt."""
    begun: set[int] = field(default_factory=set)
    """The indices of the sequences of which a part is written already."""

    id_prefix = "cmpl"
    objects = ("text_completion", "text_completion")

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt) for prompt in self.prompts)

    def choices(self, sequences: list[GeneratedSequence]) -> Iterator[dict[str, Any]]:
        for index, sequence in enumerate(sequences):
            # The logprobs of a prompt are computed only for its first sequence.
            first = sequences[index - index % self.num_each]
            yield self._choice(index, sequence, first.prompt_logprobs)

    def chunks(self, index: int, delta: Delta) -> Iterator[str]:
        choice = self._choice(index, delta, delta.prompt_logprobs)
        logprobs = choice["logprobs"]
        if choice["text"] or delta.finish_reason is not None or (logprobs and logprobs["tokens"]):
            yield json.dumps(choice)

    def _choice(
        self,
        index: int,
        part: GeneratedSequence | Delta,
        prompt_logprobs: Iterable[TokenLogprob] | None,
    ) -> dict[str, Any]:
        number = index // self.num_each
        text, echo = part.text, self.echoes[number]
        logprobs = None if self.request.logprobs is None else _Logprobs(self.tokenizer)
        if index not in self.begun:
            self.begun.add(index)
            text = echo + text
            if logprobs and self.request.echo:
                logprobs.add_prompt(
                    self.prompts[number], self.echo_offsets[number], prompt_logprobs or ()
                )
        if logprobs:
            logprobs.add(part.tokens, len(echo))
        return {
            "index": index,
            "text": text,
            "logprobs": logprobs.body if logprobs else None,
            "finish_reason": part.finish_reason,
            "stop_reason": part.stop_reason,
        }


def plan_completion(request: CompletionRequest, live: LiveRelease) -> CompletionPlan:
    """Decide what to generate for a request. Raises RequestError if the request does not fit the
    release."""
    prompts = [
        encode_prompt(live, prompt, "prompt", add_special_tokens=request.add_special_tokens)
        for prompt in request.prompts
    ]
    echoes = [
        _echo(request, live.tokenizer, given if isinstance(given, str) else None, token_ids)
        for given, token_ids in zip(request.prompts, prompts, strict=True)
    ]
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
                num_sequences=request.n,
                num_logprobs=request.logprobs,
                num_prompt_logprobs=request.logprobs if request.echo else None,
                param="prompt",
            )
        ],
        num_each=request.n,
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


def encode_prompt(
    live: LiveRelease, prompt: str | list[int], param: str, *, add_special_tokens: bool
) -> tuple[int, ...]:
    """The token ids of a prompt. `param` is the field of the request that contains the prompt.

    Raises RequestError if there is no token id, if the network has no embedding for one of them, or
    if the prompt is too long (`_check_length`).
    """
    _check_length(live, prompt, param)
    if isinstance(prompt, str):
        token_ids = live.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
    else:
        token_ids = tuple(prompt)
    check_token_ids(live, token_ids, param)
    if not token_ids:
        raise RequestError(
            400,
            f"{param}: is empty, and the tokenizer adds no token to it; give at least one token",
            param=param,
            code="empty_prompt",
        )
    return token_ids


def _check_length(live: LiveRelease, prompt: str | list[int], param: str) -> None:
    """Raise RequestError if the prompt cannot fit into the context, as in vLLM. A list of token ids
    must not be longer than the context. A text must not have more characters than a context that is
    full of the longest token. This check takes almost no time, unlike the tokenizer."""
    limit, unit = live.context_length, "token ids"
    if isinstance(prompt, str):
        limit, unit = limit * live.tokenizer.max_token_chars, "characters"
    if len(prompt) > limit:
        raise _too_long(
            live,
            f"your prompt has {len(prompt)} {unit}, more than the {limit} {unit} that fit; shorten "
            "the prompt",
            param,
        )


def check_token_ids(live: LiveRelease, token_ids: tuple[int, ...], param: str) -> None:
    """Raise RequestError if the network has no embedding for one of `token_ids`."""
    limit = live.tokenizer.vocab_size
    largest = max(token_ids, default=0)
    if largest >= limit:
        raise RequestError(
            400,
            f"{param}: token id {largest} is not below {limit}, the size of the vocabulary",
            param=param,
            code="invalid_value",
        )


def _too_long(live: LiveRelease, what: str, param: str) -> RequestError:
    """The error for a prompt that does not fit into the context. It begins as the error of OpenAI
    and vLLM does, because clients that shorten a conversation recognise it by these words."""
    message = (
        f"This model's maximum context length is {live.context_length} tokens. However, {what}"
    )
    return RequestError(400, message, param=param, code="context_length_exceeded")


def make_generations(
    request: SamplingRequest,
    live: LiveRelease,
    prompt: tuple[int, ...],
    *,
    max_tokens: int | None,
    num_sequences: int,
    num_logprobs: int | None,
    num_prompt_logprobs: int | None,
    param: str,
    max_tokens_param: str = "max_tokens",
) -> list[Generation]:
    """`num_sequences` generations for one prompt.

    A `max_tokens` of None means as many tokens as fit into the context, or `max_new_tokens` of the
    release's generation_config.json if this is less. `param` and `max_tokens_param` are the fields
    that errors name. Raises RequestError if the prompt and `max_tokens` do not fit into the
    context, or if the network has no embedding for a token id of the request.
    """
    room = live.context_length - len(prompt)
    if room < (0 if max_tokens == 0 else 1):
        raise _too_long(live, f"your prompt has {len(prompt)} tokens; shorten the prompt", param)
    if max_tokens is not None and max_tokens > room:
        raise _too_long(
            live,
            f"you requested {len(prompt) + max_tokens} tokens ({len(prompt)} in the prompt, "
            f"{max_tokens} in the completion); ask for at most {room} new tokens",
            max_tokens_param,
        )
    bias = {int(token_id): value for token_id, value in (request.logit_bias or {}).items()}
    check_token_ids(live, tuple(bias), "logit_bias")
    stop_token_ids = tuple(request.stop_token_ids)
    check_token_ids(live, stop_token_ids, "stop_token_ids")
    if not request.ignore_eos:
        stop_token_ids += live.tokenizer.eos_token_ids
    if request.min_tokens and len(set(stop_token_ids)) >= live.tokenizer.vocab_size:
        # No token could be the first one. An engine would choose one of the forbidden tokens.
        raise RequestError(
            400,
            "min_tokens: every token of the vocabulary ends the text, so the text cannot have more "
            "tokens; give fewer stop_token_ids",
            param="min_tokens",
            code="invalid_value",
        )
    allowed = None if request.allowed_token_ids is None else tuple(set(request.allowed_token_ids))
    check_token_ids(live, allowed or (), "allowed_token_ids")
    defaults = live.tokenizer.sampling_defaults
    if max_tokens is None:
        max_tokens = min(room, int(defaults.get("max_tokens", room)))

    def chosen(name: str, neutral: float) -> float:
        """The value in the request. If the request has none, the value of the release. If the
        release has none either, `neutral`, which is the default of OpenAI or vLLM."""
        asked: float | None = getattr(request, name)
        return defaults.get(name, neutral) if asked is None else asked

    top_k = int(chosen("top_k", 0))
    return [
        Generation(
            prompt=prompt,
            max_tokens=max_tokens,
            min_tokens=min(request.min_tokens, max_tokens),
            temperature=chosen("temperature", 1.0),
            top_p=chosen("top_p", 1.0),
            # A `top_k` of the vocabulary's size or more limits nothing. Replace it by 0, because
            # some engines cannot represent very large numbers.
            top_k=top_k if 0 < top_k < live.tokenizer.vocab_size else 0,
            min_p=chosen("min_p", 0.0),
            presence_penalty=chosen("presence_penalty", 0.0),
            frequency_penalty=chosen("frequency_penalty", 0.0),
            repetition_penalty=chosen("repetition_penalty", 1.0),
            logit_bias=bias,
            # With the same seed, all `n` sequences would be equal.
            seed=None if request.seed is None else _within_64_bits(request.seed + number),
            stop_token_ids=stop_token_ids,
            allowed_token_ids=allowed,
            grammar=request.grammar,
            num_logprobs=num_logprobs,
            # Usually, the logprobs of the prompt are computed only for the first sequence. But in a
            # stream, each sequence needs them together with its first text, and must not wait for
            # another sequence.
            num_prompt_logprobs=num_prompt_logprobs if number == 0 or request.stream else None,
            # With stop strings, look at each token at once: tokens that the engine generates after
            # a stop string are wasted.
            max_step_tokens=1 if request.stream or request.stops else MAX_STEP_TOKENS,
        )
        for number in range(num_sequences)
    ]


def _within_64_bits(seed: int) -> int:
    """`seed`, but after the largest signed 64-bit number the count continues with the smallest."""
    return seed if seed <= MAX_SEED else seed - MAX_SEED + MIN_SEED - 1
