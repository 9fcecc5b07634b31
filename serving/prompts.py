"""Checks the prompt of a request, and turns it into token ids."""

from serving.admission import LiveRelease
from serving.request_errors import RequestError


def encode_prompt(
    live: LiveRelease, prompt: str | list[int], param: str, *, add_special_tokens: bool
) -> tuple[int, ...]:
    """The token ids of a prompt. `param` is the field of the request that contains the prompt.

    Raises RequestError if there is no token id, if the network has no embedding for one of them, or
    if the prompt is too long (`check_length`).
    """
    check_length(live, prompt, param)
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


def check_length(live: LiveRelease, prompt: str | list[int], param: str) -> None:
    """Raise RequestError if the prompt cannot fit into the context, as in vLLM. A list of token ids
    must not be longer than the context. A text must not have more characters than a context that is
    full of the longest token. This check takes almost no time, unlike the tokenizer."""
    limit, unit = live.context_length, "token ids"
    if isinstance(prompt, str):
        limit, unit = limit * live.tokenizer.max_token_chars, "characters"
    if len(prompt) > limit:
        raise too_long(
            f"the prompt has {len(prompt)} {unit}, and the context {live.context_length} tokens, "
            f"which is at most {limit} {unit}; shorten the prompt",
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


def too_long(message: str, param: str) -> RequestError:
    """The error for a prompt that does not fit into the context."""
    return RequestError(400, message, param=param, code="context_length_exceeded")
