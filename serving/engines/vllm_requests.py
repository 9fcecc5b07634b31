"""Converts a `Generation` to vLLM's sampling parameters, and vLLM's outputs to `Step`s."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from vllm import SamplingParams
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from serving.engine import (
    EngineError,
    Generation,
    GenerationRefused,
    Grammar,
    Step,
    TokenLogprob,
    reported_logprob,
)


def sampling_params(generation: Generation, end_of_text: int | None) -> SamplingParams:
    """`end_of_text` is the token that vLLM generates when a grammar ends the text.

    Raises GenerationRefused if the generation has a grammar and `end_of_text` is None.
    """
    stops = list(generation.stop_token_ids)
    if generation.grammar is not None:
        if end_of_text is None:
            raise GenerationRefused(
                "vLLM was started without the tokenizer of this release, or this tokenizer has no "
                "end-of-sequence token",
                param=generation.grammar.param,
            )
        stops.append(end_of_text)
    allowed = generation.allowed_token_ids
    return SamplingParams(
        # vLLM generates at least one token. If only the prompt is scored, this token is dropped.
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
        stop_token_ids=stops,
        allowed_token_ids=None if allowed is None else list(allowed),
        structured_outputs=_structured_outputs(generation.grammar),
        # `stop_token_ids` has the end-of-sequence ids, unless the request ignores them.
        ignore_eos=True,
        logprobs=generation.num_logprobs,
        prompt_logprobs=generation.num_prompt_logprobs,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def _structured_outputs(grammar: Grammar | None) -> StructuredOutputsParams | None:
    match grammar:
        case None:
            return None
        case Grammar(kind="json_schema"):
            return StructuredOutputsParams(json=grammar.text)
        case Grammar(kind="choice"):
            return StructuredOutputsParams(choice=json.loads(grammar.text))
        case Grammar(kind="regex"):
            return StructuredOutputsParams(regex=grammar.text)
    return StructuredOutputsParams(grammar=grammar.text)


def step_of(output: RequestOutput, generation: Generation, release_id: str) -> Step:
    """Convert an output. Raises EngineError if vLLM ended the sequence for another reason than
    `stop` or `length`, or if weights of another release computed a token. Raises GenerationRefused
    if vLLM cannot compile the grammar."""
    (completion,) = output.outputs
    if completion.finish_reason == "error" and generation.grammar is not None:
        raise GenerationRefused("vLLM cannot compile this grammar", param=generation.grammar.param)
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
    """`found` has the most probable tokens, and always `token_id`."""
    # vLLM computes logprobs after it has applied the grammar, so those of tokens that the grammar
    # forbids are minus infinity.
    best = sorted(found.items(), key=lambda item: -item[1].logprob)[:num_top]
    return TokenLogprob(
        token_id=token_id,
        logprob=reported_logprob(found[token_id].logprob),
        top=tuple((other, reported_logprob(each.logprob)) for other, each in best),
    )
