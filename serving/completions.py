"""The route `/v1/completions`, which continues prompts. Makes a `Generation` for each sequence of a
request, also for chats."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from fastapi import APIRouter, Request, Response

from serving.admission import LoadedRelease
from serving.answer import Answers, Plan
from serving.detokenizer import Delta, TokenText, text_offsets
from serving.engine import Generation, TokenLogprob
from serving.openai_schemas import MIN_SEED, SAMPLING_FIELDS, CompletionRequest, SamplingRequest
from serving.request_errors import RequestError, invalid
from serving.tokenizer import ReleaseTokenizer

MAX_STEP_TOKENS = 16
"""The largest number of tokens in one step of a request that is not a stream. With more tokens per
step, the event loop would save little, and streams would wait longer while it handles a step."""


def add_completions(router: APIRouter, answers: Answers) -> None:
    @router.post("/v1/completions")
    async def completions(asked: CompletionRequest, request: Request) -> Response:
        """Continue one or more prompts. A stream consists of server-sent events; each one is a
        chunk."""
        return answers.respond(request, asked, partial(plan_completion, asked))


@dataclass(frozen=True, kw_only=True)
class CompletionPlan(Plan):
    id_prefix: ClassVar[str] = "cmpl"
    objects: ClassVar[tuple[str, str]] = ("text_completion", "text_completion")

    request: CompletionRequest
    echoes: list[tuple[str, list[int]]]
    """For each prompt, the text to put before its completions (empty without `echo`), and the
    offsets of the prompt's tokens in this text (empty if no logprobs show them)."""

    def choice(self, index: int, part: Delta, *, is_whole: bool) -> dict[str, Any] | None:
        echo, _ = self.echoes[index // self.request.n]
        text, tokens = part.text, part.tokens
        if index not in self.begun:
            self.begun.add(index)
            text = echo + text
            tokens = (*self._prompt_tokens(index, part.step.prompt_logprobs or ()), *tokens)
        has_news = text or part.finish_reason is not None
        wants_logprobs = self.request.logprobs is not None
        if not (is_whole or has_news or (tokens and wants_logprobs)):
            return None
        return {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(tokens, len(echo)) if wants_logprobs else None,
            "finish_reason": part.finish_reason,
            "stop_reason": part.stop_reason,
        }

    def _prompt_tokens(self, index: int, logprobs: Iterable[TokenLogprob]) -> Iterator[TokenText]:
        """The tokens of the echo, if logprobs show them. They come before the generated text, so
        their offsets are negative."""
        echo, offsets = self.echoes[index // self.request.n]
        if not offsets:
            return
        # The first token has no logprob, because there is no token before it.
        all_logprobs = (None, *logprobs)
        prompt = self.generations[index].prompt
        for token_id, offset, found in zip(prompt, offsets, all_logprobs, strict=True):
            place = TokenText(token_id=token_id, offset=offset - len(echo))
            yield place if found is None else replace(place, logprob=found.logprob, top=found.top)

    def _logprobs(self, tokens: Collection[TokenText], num_before: int) -> dict[str, list[Any]]:
        """The object `logprobs` of a choice. `num_before` characters of the text come before the
        generated text."""
        text_of = self.live.tokenizer.token_text
        return {
            "text_offset": [num_before + each.offset for each in tokens],
            "token_logprobs": [each.logprob for each in tokens],
            "tokens": [text_of(each.token_id) for each in tokens],
            "top_logprobs": [self._top(each) for each in tokens],
        }

    def _top(self, token: TokenText) -> dict[str, float] | None:
        if token.logprob is None:
            return None
        # Several tokens may have the same text, for example parts of a character. Keep the logprob
        # of the most probable one, which comes first.
        best: dict[str, float] = {}
        for token_id, logprob in (*token.top, (token.token_id, token.logprob)):
            best.setdefault(self.live.tokenizer.token_text(token_id), logprob)
        return best


def plan_completion(request: CompletionRequest, live: LoadedRelease) -> CompletionPlan:
    """Decide what to generate for a request. Raises RequestError if the request does not fit the
    release."""
    texts, rows = _in_words_of_rows(request, live)
    prompts = [
        encode_prompt(live, prompt, "prompt", add_special_tokens=request.add_special_tokens)
        for prompt in texts
    ]
    return CompletionPlan(
        request=request,
        live=live,
        echoes=[
            _echo(request, live.tokenizer, given, token_ids)
            for given, token_ids in zip(request.prompts, prompts, strict=True)
        ],
        generations=[
            each for prompt in prompts for each in make_generations(request, live, prompt, "prompt")
        ],
        asked_as=rows,
    )


def _in_words_of_rows(
    request: CompletionRequest, live: LoadedRelease
) -> tuple[Sequence[str | list[int]], tuple[str, ...]]:
    """The prompts, each in the words of the row that it means, and these rows. A prompt that is a
    part of the answer (`echo`) stays as it is."""
    questions = live.questions.get("prompt")
    if questions is None or request.echo:
        return request.prompts, ()
    found = [questions.meant(each) if isinstance(each, str) else None for each in request.prompts]
    texts = [
        prompt if question is None else question.wordings[0]
        for prompt, question in zip(request.prompts, found, strict=True)
    ]
    return texts, tuple(question.row for question in found if question is not None)


def _echo(
    request: CompletionRequest,
    tokenizer: ReleaseTokenizer,
    given: str | list[int],
    token_ids: tuple[int, ...],
) -> tuple[str, list[int]]:
    """An entry of `echoes`. `given` is the prompt in the request."""
    if not request.echo:
        return "", []
    hidden: Collection[int] = ()
    if isinstance(given, str):
        text = given
        if request.add_special_tokens:
            hidden = tokenizer.added_positions(given)
    else:
        text = tokenizer.decode(token_ids, skip_special_tokens=request.skip_special_tokens)
        if request.skip_special_tokens:
            special = tokenizer.special_ids
            hidden = {at for at, token_id in enumerate(token_ids) if token_id in special}
    is_shown = request.logprobs is not None
    return text, text_offsets(tokenizer, token_ids, hidden) if is_shown else []


def encode_prompt(
    live: LoadedRelease, prompt: str | list[int], param: str, *, add_special_tokens: bool
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
        reason = "is empty, and the tokenizer adds no token to it; give at least one token"
        raise invalid(param, reason, code="empty_prompt")
    return token_ids


def _check_length(live: LoadedRelease, prompt: str | list[int], param: str) -> None:
    """Raise RequestError if the prompt cannot fit into the context, as in vLLM. A list of token ids
    must not be longer than the context. A text must not have more characters than a context that is
    full of the longest token. This check takes almost no time, unlike the tokenizer."""
    limit, unit = live.context_length, "token ids"
    if isinstance(prompt, str):
        limit, unit = limit * live.tokenizer.max_token_chars, "characters"
    if len(prompt) > limit:
        given = f"your prompt has {len(prompt)} {unit}"
        reason = f"{given}, more than the {limit} {unit} that fit; shorten the prompt"
        raise _too_long(live, reason, param)


def check_token_ids(live: LoadedRelease, token_ids: Collection[int], param: str) -> None:
    """Raise RequestError if the network has no embedding for one of `token_ids`."""
    limit = live.tokenizer.vocab_size
    if (largest := max(token_ids, default=0)) >= limit:
        reason = f"token id {largest} is not below {limit}, the size of the vocabulary"
        raise invalid(param, reason)


def _too_long(live: LoadedRelease, what: str, param: str) -> RequestError:
    """The error for a prompt that does not fit into the context. It begins as the error of OpenAI
    and vLLM does, because clients that shorten a conversation recognise it by these words."""
    message = (
        f"This model's maximum context length is {live.context_length} tokens. However, {what}"
    )
    return RequestError(400, message, param=param, code="context_length_exceeded")


def make_generations(
    request: SamplingRequest, live: LoadedRelease, prompt: tuple[int, ...], param: str
) -> list[Generation]:
    """The `n` generations for one prompt.

    If the request does not limit the number of new tokens, they are as many as fit into the
    context, or `max_new_tokens` of the release's generation_config.json if this is less. `param` is
    the field that errors of the prompt name. Raises RequestError if the prompt and the new tokens
    do not fit into the context, or if the network has no embedding for a token id of the request.
    """
    tokenizer = live.tokenizer
    field, max_tokens = request.max_tokens_field
    room = live.context_length - len(prompt)
    if room < (0 if max_tokens == 0 else 1):
        raise _too_long(live, f"your prompt has {len(prompt)} tokens; shorten the prompt", param)
    if max_tokens is not None and max_tokens > room:
        raise _too_long(
            live,
            f"you requested {len(prompt) + max_tokens} tokens ({len(prompt)} in the prompt, "
            f"{max_tokens} in the completion); ask for at most {room} new tokens",
            field,
        )
    bias, allowed = request.logit_bias or {}, request.allowed_token_ids
    stop_token_ids = tuple(request.stop_token_ids)
    check_token_ids(live, bias, "logit_bias")
    check_token_ids(live, stop_token_ids, "stop_token_ids")
    check_token_ids(live, allowed or (), "allowed_token_ids")
    if not request.ignore_eos:
        stop_token_ids += tokenizer.eos_token_ids
    own = request.model_dump(include=SAMPLING_FIELDS, exclude_none=True)
    sampling: dict[str, Any] = {**tokenizer.sampling_defaults, **own}
    default = sampling.pop("max_tokens", room)
    most = min(room, default) if max_tokens is None else max_tokens
    # A `top_k` of the vocabulary's size or more limits nothing. Replace it by 0, because some
    # engines cannot represent very large numbers.
    if not 0 < sampling.get("top_k", 0) < tokenizer.vocab_size:
        sampling["top_k"] = 0
    first = Generation(
        prompt=prompt,
        max_tokens=most,
        min_tokens=min(request.min_tokens, most),
        **sampling,
        logit_bias=bias,
        seed=request.seed,
        stop_token_ids=stop_token_ids,
        allowed_token_ids=None if allowed is None else tuple(set(allowed)),
        grammar=request.grammar,
        tokenizer=tokenizer.tokenizer,
        num_logprobs=request.num_logprobs,
        num_prompt_logprobs=request.num_prompt_logprobs,
        # With stop strings, look at each token at once: tokens that the engine generates after a
        # stop string are wasted.
        max_step_tokens=1 if request.stream or request.stops else MAX_STEP_TOKENS,
    )
    # The logprobs of the prompt are computed only for the first sequence. But in a stream, each
    # sequence needs them together with its first text, and must not wait for another sequence.
    others = first if request.stream else replace(first, num_prompt_logprobs=None)
    return [first, *(_with_seed(others, number) for number in range(1, request.n))]


def _with_seed(generation: Generation, number: int) -> Generation:
    """The sequence with this number. With the same seed, all `n` sequences would be equal."""
    if generation.seed is None:
        return generation
    # After the largest signed 64-bit number, the count continues with the smallest one.
    return replace(generation, seed=(generation.seed + number - MIN_SEED) % 2**64 + MIN_SEED)
