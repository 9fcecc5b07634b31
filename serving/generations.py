"""From a checked request to what an engine is asked to generate, against the live release."""

from serving.admission import LiveRelease
from serving.engine import Generation
from serving.openai_schemas import MAX_SEED, MIN_SEED, SamplingRequest
from serving.request_errors import RequestError

MAX_STEP_TOKENS = 16
"""Of an answer that is read as a whole. More would cost as little, and keep the event loop from
streams for longer at a time."""


def encode_prompt(live: LiveRelease, prompt: str | list[int], param: str) -> tuple[int, ...]:
    """Token ids of a prompt. Raises RequestError for none, or for ids that the network lacks."""
    token_ids = live.tokenizer.encode(prompt) if isinstance(prompt, str) else tuple(prompt)
    check_token_ids(live, token_ids, param)
    if not token_ids:
        raise RequestError(
            400,
            f"{param}: empty, and this release's tokenizer puts no token before a text; "
            "give at least one token",
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
    new_tokens = room if max_tokens is None else max_tokens
    return [
        Generation(
            prompt=prompt,
            max_tokens=new_tokens,
            min_tokens=min(request.min_tokens, new_tokens),
            temperature=request.temperature,
            top_p=request.top_p,
            # More than there are is no limit; and not every engine can carry any number.
            top_k=request.top_k if 0 < request.top_k < live.tokenizer.vocab_size else 0,
            min_p=request.min_p,
            presence_penalty=request.presence_penalty,
            frequency_penalty=request.frequency_penalty,
            repetition_penalty=request.repetition_penalty,
            logit_bias=bias,
            # With one seed for all, `n` sequences would be one sequence n times.
            seed=None if request.seed is None else _within_64_bits(request.seed + number),
            stop_token_ids=stop_token_ids,
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
