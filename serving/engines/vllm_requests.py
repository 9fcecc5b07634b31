"""From `Generation` to vLLM's sampling parameters, and from vLLM's outputs to `Step`."""

from collections.abc import Mapping, Sequence
from typing import Any

from vllm import SamplingParams
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind

from serving.engine import EngineError, Generation, Step, TokenLogprob


def sampling_params(generation: Generation) -> SamplingParams:
    return SamplingParams(
        # vLLM generates at least one token: where only the prompt is scored, it is dropped.
        max_tokens=max(generation.max_tokens, 1),
        min_tokens=generation.min_tokens,
        temperature=generation.temperature,
        top_p=generation.top_p,
        top_k=generation.top_k,
        min_p=generation.min_p,
        presence_penalty=generation.presence_penalty,
        frequency_penalty=generation.frequency_penalty,
        repetition_penalty=generation.repetition_penalty,
        logit_bias=dict(generation.logit_bias) or None,
        seed=generation.seed,
        stop_token_ids=list(generation.stop_token_ids),
        # End-of-sequence ids are among the stop ids, where the request wants them.
        ignore_eos=True,
        logprobs=generation.num_logprobs,
        prompt_logprobs=generation.num_prompt_logprobs,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def step_of(output: RequestOutput, generation: Generation, release_id: str) -> Step:
    """Raises EngineError where vLLM ended a sequence for a reason of its own, or computed a token
    with weights of another release."""
    (completion,) = output.outputs
    if completion.finish_reason not in (None, "stop", "length"):
        raise EngineError(f"vLLM ended the sequence: {completion.finish_reason}")
    strange = {span.version for span in completion.weight_versions or ()} - {release_id}
    if strange:
        raise EngineError(f"tokens of {', '.join(sorted(strange))} in an answer of {release_id}")
    prompt_logprobs = None
    if generation.num_prompt_logprobs is not None and output.prompt_logprobs:
        prompt_logprobs = tuple(
            _logprob(token_id, found, generation.num_prompt_logprobs)
            for token_id, found in zip(
                generation.prompt[1:], output.prompt_logprobs[1:], strict=True
            )
            if found is not None
        )
    if generation.max_tokens == 0:
        return Step(prompt_logprobs=prompt_logprobs, finish_reason="length")
    token_ids = tuple(completion.token_ids)
    return Step(
        token_ids=token_ids,
        logprobs=_logprobs(token_ids, completion.logprobs, generation.num_logprobs),
        prompt_logprobs=prompt_logprobs,
        finish_reason=completion.finish_reason,
        num_cached_tokens=output.num_cached_tokens or 0,
    )


def _logprobs(
    token_ids: tuple[int, ...], found: Sequence[Mapping[int, Any]] | None, num_top: int | None
) -> tuple[TokenLogprob, ...]:
    if found is None or num_top is None:
        return ()
    return tuple(
        _logprob(token_id, each, num_top) for token_id, each in zip(token_ids, found, strict=True)
    )


def _logprob(token_id: int, found: Mapping[int, Any], num_top: int) -> TokenLogprob:
    """`found` has the most probable tokens, and `token_id` whether it is one of them or not."""
    best = sorted(found.items(), key=lambda item: -item[1].logprob)[:num_top]
    return TokenLogprob(
        token_id=token_id,
        logprob=found[token_id].logprob,
        top=tuple((other, each.logprob) for other, each in best),
    )
