"""Converts a `Generation` to a request for SGLang's `/generate`, and its chunks to `Step`s."""

from dataclasses import dataclass
from typing import Any

from serving.engine import EngineError, Generation, Step, TokenLogprob, reported_logprob


class WrongWeights(Exception):
    """The upstream computed with other weights than those of the requested release."""


@dataclass
class StreamProgress:
    num_tokens: int = 0
    has_begun: bool = False


def request_of(generation: Generation, request_id: str) -> dict[str, Any]:
    wants = [generation.num_logprobs, generation.num_prompt_logprobs]
    return {
        "rid": request_id,
        "input_ids": list(generation.prompt),
        "stream": True,
        "return_logprob": any(each is not None for each in wants),
        "logprob_start_len": 0 if generation.num_prompt_logprobs is not None else -1,
        "top_logprobs_num": max(each or 0 for each in wants),
        "sampling_params": {
            "max_new_tokens": generation.max_tokens,
            "min_new_tokens": generation.min_tokens,
            "temperature": generation.temperature,
            "top_p": generation.top_p,
            "top_k": generation.top_k or -1,
            "min_p": generation.min_p,
            "presence_penalty": generation.presence_penalty,
            "frequency_penalty": generation.frequency_penalty,
            "repetition_penalty": generation.repetition_penalty,
            "logit_bias": {str(token): bias for token, bias in generation.logit_bias.items()}
            or None,
            "sampling_seed": generation.seed,
            "stop_token_ids": list(generation.stop_token_ids) or None,
            # `stop_token_ids` has the end-of-sequence ids, unless the request ignores them.
            "ignore_eos": True,
            "skip_special_tokens": False,
        },
    }


def step_of(
    chunk: dict[str, Any], generation: Generation, release_id: str, progress: StreamProgress
) -> Step:
    """Convert a chunk. Raises WrongWeights, and EngineError if SGLang ended the sequence for
    another reason than `stop` or `length`.

    By default a chunk has all tokens of the answer so far. If the upstream streams differences, it
    has only the new tokens. In both cases the new tokens are the last ones.
    """
    meta = chunk["meta_info"]
    version = meta.get("weight_version")
    if version is None:
        raise EngineError("SGLang names no weight_version beside its tokens")
    if version != release_id:
        raise WrongWeights(f"tokens of {version} in an answer of {release_id}")
    reason = (meta.get("finish_reason") or {}).get("type")
    if reason not in (None, "stop", "length"):
        raise EngineError(f"SGLang ended the sequence: {meta['finish_reason']}")
    num_new = meta["completion_tokens"] - progress.num_tokens
    progress.num_tokens += num_new
    token_ids = tuple(chunk["output_ids"][-num_new:]) if num_new else ()
    logprobs: tuple[TokenLogprob, ...] = ()
    if generation.num_logprobs is not None and num_new:
        logprobs = _logprobs(meta, "output", generation.num_logprobs)[-num_new:]
    prompt_logprobs = None
    if generation.num_prompt_logprobs is not None and not progress.has_begun:
        prompt_logprobs = _logprobs(meta, "input", generation.num_prompt_logprobs)
    is_first, progress.has_begun = not progress.has_begun, True
    return Step(
        token_ids=token_ids,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        finish_reason=reason,
        num_cached_tokens=meta.get("cached_tokens", 0) if is_first else 0,
    )


def _logprobs(meta: dict[str, Any], side: str, num_top: int) -> tuple[TokenLogprob, ...]:
    """SGLang gives `[logprob, token id, text]` for each token. The logprob of the first prompt
    token is None."""
    tops = meta.get(f"{side}_top_logprobs") or []
    found = []
    for number, (logprob, token_id, _) in enumerate(meta[f"{side}_token_logprobs"]):
        if logprob is None:
            continue
        top = (tops[number] or [])[:num_top] if number < len(tops) else []
        found.append(
            TokenLogprob(
                token_id=token_id,
                logprob=reported_logprob(logprob),
                top=tuple((other, reported_logprob(value)) for value, other, _ in top),
            )
        )
    return tuple(found)
