"""The sequences of a request: what the engine is asked to generate, and its tokens as text."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

from serving.admission import LiveRelease
from serving.engine import Engine, Generation, Step, TokenLogprob
from serving.openai_schemas import MAX_SEED, MIN_SEED, SamplingRequest
from serving.request_errors import RequestError
from serving.stop_strings import StopStrings
from serving.tokenizer import Detokenizer

MAX_STEP_TOKENS = 16
"""Of an answer that is read as a whole. More would cost as little, and keep the event loop from
streams for longer at a time."""


def encode_prompt(
    live: LiveRelease, prompt: str | list[int], param: str, *, add_special_tokens: bool
) -> tuple[int, ...]:
    """Token ids of a prompt. Raises RequestError for none, or for ids that the network lacks."""
    if isinstance(prompt, str):
        token_ids = live.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
    else:
        token_ids = tuple(prompt)
    check_token_ids(live, token_ids, param)
    if not token_ids:
        raise RequestError(
            400,
            f"{param}: empty, and no token is put before a text here; give at least one token",
            param=param,
            code="empty_prompt",
        )
    return token_ids


def check_token_ids(live: LiveRelease, token_ids: tuple[int, ...], param: str) -> None:
    limit = live.tokenizer.vocab_size
    largest = max(token_ids, default=0)
    if largest >= limit:
        raise RequestError(
            400,
            f"{param}: token id {largest} is not below {limit}, the size of the vocabulary",
            param=param,
            code="invalid_value",
        )


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
    """One for each sequence of a prompt. Raises RequestError where the context is too small."""
    context = live.context_length
    room = context - len(prompt)
    if room < (0 if max_tokens == 0 else 1):
        raise _too_long(
            f"the prompt has {len(prompt)} tokens, and the context {context}; shorten the prompt",
            param,
        )
    if max_tokens is not None and max_tokens > room:
        raise _too_long(
            f"the context has {context} tokens: {len(prompt)} of the prompt and {max_tokens} new "
            f"ones are more; ask for at most {room}",
            max_tokens_param,
        )
    bias = {int(token_id): value for token_id, value in (request.logit_bias or {}).items()}
    check_token_ids(live, tuple(bias), "logit_bias")
    stop_token_ids = tuple(request.stop_token_ids)
    check_token_ids(live, stop_token_ids, "stop_token_ids")
    if not request.ignore_eos:
        stop_token_ids += live.tokenizer.eos_token_ids
    allowed = None if request.allowed_token_ids is None else tuple(request.allowed_token_ids)
    check_token_ids(live, allowed or (), "allowed_token_ids")
    defaults = live.tokenizer.sampling_defaults
    if max_tokens is None:
        max_tokens = min(room, int(defaults.get("max_tokens", room)))

    def chosen(name: str, neutral: float) -> float:
        """What the request says, else the release, else OpenAI."""
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
            # More than there are is no limit; and not every engine can carry any number.
            top_k=top_k if 0 < top_k < live.tokenizer.vocab_size else 0,
            min_p=chosen("min_p", 0.0),
            presence_penalty=chosen("presence_penalty", 0.0),
            frequency_penalty=chosen("frequency_penalty", 0.0),
            repetition_penalty=chosen("repetition_penalty", 1.0),
            logit_bias=bias,
            # With one seed for all, `n` sequences would be one sequence n times.
            seed=None if request.seed is None else _within_64_bits(request.seed + number),
            stop_token_ids=stop_token_ids,
            allowed_token_ids=allowed,
            grammar=request.grammar,
            num_logprobs=num_logprobs,
            num_prompt_logprobs=num_prompt_logprobs,
            # A stop string is looked for as soon as it can be there: what follows is thrown away.
            max_step_tokens=1 if request.stream or request.stops else MAX_STEP_TOKENS,
        )
        for number in range(num_sequences)
    ]


def check_num_sequences(number: int, limit: int, param: str) -> None:
    if number > limit:
        raise RequestError(
            400,
            f"more than {limit} sequences in one request (prompts times n or best_of)",
            param=param,
            code="too_many_sequences",
        )


def _within_64_bits(seed: int) -> int:
    """The largest seed is followed by the smallest."""
    return seed if seed <= MAX_SEED else seed - MAX_SEED + MIN_SEED - 1


def _too_long(message: str, param: str) -> RequestError:
    return RequestError(400, message, param=param, code="context_length_exceeded")


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenText:
    """A token with its place in the text that was generated."""

    token_id: int
    offset: int
    """Characters of generated text before it."""
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Delta:
    """What is certain after a step; concatenated over all steps, the whole sequence."""

    text: str = ""
    tokens: tuple[TokenText, ...] = ()
    """Those that begin in text given out so far; only with logprobs."""
    num_tokens: int = 0
    """Generated, given out or not."""
    num_cached_tokens: int = 0
    """Of the prompt, found in the engine's cache; on the first delta."""
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    """The stop string, or the one of the request's `stop_token_ids`, that ended the sequence."""
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(slots=True)
class Sequence:
    """All deltas of a sequence together."""

    text: str = ""
    tokens: list[TokenText] = field(default_factory=list)
    num_tokens: int = 0
    num_cached_tokens: int = 0
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None

    def add(self, delta: Delta) -> None:
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
        logprobs = [token.logprob for token in self.tokens if token.logprob is not None]
        return sum(logprobs) / len(logprobs) if logprobs else float("-inf")


class TextReader:
    """Reads the steps of one sequence: detokenises, cuts at stop strings, places the logprobs."""

    def __init__(self, live: LiveRelease, generation: Generation, request: SamplingRequest) -> None:
        self._detokenizer = Detokenizer(
            live.tokenizer, generation.prompt, skip_special_tokens=request.skip_special_tokens
        )
        self._includes_stop = request.include_stop_str_in_output
        self._stop_strings = StopStrings(request.stops, include=self._includes_stop)
        self._stop_ids = frozenset(generation.stop_token_ids)
        self._own_stop_ids = self._stop_ids - set(live.tokenizer.eos_token_ids)
        self._min_tokens = generation.min_tokens
        self._wants_logprobs = generation.num_logprobs is not None
        self._num_seen = 0
        self._length = 0
        """Characters of detokenised text."""
        self._given = 0
        """Characters that were given out."""
        self._held: list[TokenText] = []

    def read(self, step: Step) -> Delta:
        """What is certain after `step`. The sequence is over once it has a `finish_reason`."""
        text = ""
        stop: str | int | None = None
        num_tokens = 0
        for position, token_id in enumerate(step.token_ids):
            num_tokens += 1
            self._num_seen += 1
            is_end = step.finish_reason == "stop" and position == len(step.token_ids) - 1
            if self._wants_logprobs:
                self._held.append(_token_text(step, position, token_id, self._length))
            is_stop_token = is_end and token_id in self._stop_ids
            is_shown = self._includes_stop or not is_stop_token
            piece = self._detokenizer.add(token_id) if is_shown else ""
            self._length += len(piece)
            if self._num_seen < self._min_tokens:
                text += piece
                continue
            safe, stop = self._stop_strings.add(piece)
            text += safe
            if stop is not None:
                break
        stopped = stop is not None
        finish_reason = "stop" if stopped else step.finish_reason
        if finish_reason is not None and not stopped:
            safe, stop = self._stop_strings.add(self._detokenizer.flush())
            stopped = stop is not None
            text += safe if stopped else safe + self._stop_strings.flush()
            if not stopped and finish_reason == "stop" and step.token_ids:
                stop = step.token_ids[-1] if step.token_ids[-1] in self._own_stop_ids else None
            finish_reason = "stop" if stopped else finish_reason
        self._given += len(text)
        gives_all = finish_reason is not None and not stopped
        tokens = tuple(each for each in self._held if gives_all or each.offset < self._given)
        self._held = self._held[len(tokens) :]
        return Delta(
            text=text,
            tokens=tokens,
            num_tokens=num_tokens,
            num_cached_tokens=step.num_cached_tokens,
            finish_reason=finish_reason,
            stop_reason=stop,
            prompt_logprobs=step.prompt_logprobs,
        )


def _token_text(step: Step, position: int, token_id: int, offset: int) -> TokenText:
    if position >= len(step.logprobs):
        return TokenText(token_id=token_id, offset=offset)
    found = step.logprobs[position]
    return TokenText(token_id=token_id, offset=offset, logprob=found.logprob, top=found.top)


async def generate(
    engine: Engine, live: LiveRelease, generations: list[Generation], request: SamplingRequest
) -> AsyncGenerator[tuple[int, Delta], None]:
    """Deltas of all sequences as they come, each with the number of its sequence.

    Closing the iterator frees the slots of all in the engine. When one fails, all end.
    Raises EngineError.
    """
    if len(generations) == 1:
        async with aclosing(_deltas(engine, live, generations[0], request)) as deltas:
            async for delta in deltas:
                yield 0, delta
        return
    queue: asyncio.Queue[tuple[int, Delta] | BaseException | None] = asyncio.Queue()

    async def pump(number: int, generation: Generation) -> None:
        try:
            async with aclosing(_deltas(engine, live, generation, request)) as deltas:
                async for delta in deltas:
                    queue.put_nowait((number, delta))
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

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
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _deltas(
    engine: Engine, live: LiveRelease, generation: Generation, request: SamplingRequest
) -> AsyncGenerator[Delta, None]:
    reader = TextReader(live, generation, request)
    steps = engine.generate(live.id, generation)
    try:
        async for step in steps:
            delta = reader.read(step)
            yield delta
            if delta.finish_reason is not None:
                return
    finally:
        await steps.aclose()  # type: ignore[attr-defined]
