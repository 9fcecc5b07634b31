"""Turns prompts into token ids, makes a `Generation` for each sequence of a request, and reads the
sequences from the engine."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

from serving.admission import LiveRelease
from serving.detokenizer import Delta, TextReader, TokenText
from serving.engine import Engine, Generation, TokenLogprob
from serving.openai_schemas import MAX_SEED, MIN_SEED, SamplingRequest
from serving.request_errors import RequestError

MAX_STEP_TOKENS = 16
"""The largest number of tokens in one step of a request that is not a stream. With more tokens per
step, the event loop would save little, and streams would wait longer while it handles a step."""


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


def check_num_sequences(number: int, limit: int, param: str) -> None:
    """Raise RequestError if a request asks for more than `limit` sequences."""
    if number > limit:
        raise RequestError(
            400,
            f"more than {limit} sequences in one request (number of prompts times n or best_of)",
            param=param,
            code="too_many_sequences",
        )


def _within_64_bits(seed: int) -> int:
    """`seed`, but after the largest signed 64-bit number the count continues with the smallest."""
    return seed if seed <= MAX_SEED else seed - MAX_SEED + MIN_SEED - 1


@dataclass(slots=True)
class GeneratedSequence:
    """A sequence, put together from its deltas."""

    text: str = ""
    tokens: list[TokenText] = field(default_factory=list)
    num_tokens: int = 0
    num_cached_tokens: int = 0
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None

    def add(self, delta: Delta) -> None:
        """Append the next delta."""
        self.text += delta.text
        self.tokens += delta.tokens
        self.num_tokens += delta.num_tokens
        self.num_cached_tokens = max(self.num_cached_tokens, delta.num_cached_tokens)
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs

    @property
    def mean_logprob(self) -> float:
        """The mean logprob of the tokens; minus infinity if no token has a logprob."""
        logprobs = [token.logprob for token in self.tokens if token.logprob is not None]
        return sum(logprobs) / len(logprobs) if logprobs else float("-inf")


async def generate(
    engine: Engine, live: LiveRelease, generations: list[Generation], request: SamplingRequest
) -> AsyncGenerator[tuple[int, Delta], None]:
    """The deltas of all sequences in the order of their arrival. Each comes with the index of its
    sequence in `generations`.

    If the iterator is closed, or if one sequence fails, all sequences end and their slots in the
    engine become free. Raises EngineError.
    """
    if len(generations) == 1:
        async with aclosing(_deltas(engine, live, generations[0], request)) as deltas:
            async for delta in deltas:
                yield 0, delta
        return
    # If the client reads slowly, this queue holds at most as many deltas as there are sequences.
    # The engine may hold the further steps. If the client reads nothing for too long, the server
    # closes its connection (`READING_SECONDS` in `server.py`).
    queue: asyncio.Queue[tuple[int, Delta] | BaseException | None]
    queue = asyncio.Queue(maxsize=len(generations))
    is_read = True

    async def pump(number: int, generation: Generation) -> None:
        try:
            async with aclosing(_deltas(engine, live, generation, request)) as deltas:
                async for delta in deltas:
                    await queue.put((number, delta))
            await queue.put(None)
        except asyncio.CancelledError:
            raise
        # `BaseException` also covers a panic of a Rust library, which is not an `Exception`.
        except BaseException as error:
            if not is_read:
                raise  # nobody makes room in the queue any more
            await queue.put(error)

    tasks = [asyncio.create_task(pump(number, each)) for number, each in enumerate(generations)]
    try:
        num_running = len(tasks)
        while num_running:
            item = await queue.get()
            if item is None:
                num_running -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        is_read = False
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _deltas(
    engine: Engine, live: LiveRelease, generation: Generation, request: SamplingRequest
) -> AsyncGenerator[Delta, None]:
    reader = TextReader(live.tokenizer, generation, request)
    steps = engine.generate(live.id, generation)
    try:
        async for step in steps:
            delta = reader.read(step)
            yield delta
            if delta.finish_reason is not None:
                return
    finally:
        await steps.aclose()  # type: ignore[attr-defined]
